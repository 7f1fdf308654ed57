"""What a script adds up over a step: one sum over the global batch, known after the step, by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import elastrain
from elastrain.errors import ConfigError

DATA = [torch.full((2,), float(at)) for at in range(10)]


@pytest.fixture(autouse=True)
def _hook_kept() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def job(run_length: int = 1) -> tuple[elastrain.Job, nn.Module, elastrain.DataLoader]:
    job = elastrain.init(run_length=run_length)
    model = nn.Linear(2, 1)
    loader = elastrain.DataLoader(DATA, global_batch_size=4, micro_batch_size=2, num_workers=0, shuffle=False)
    job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    return job, model, loader


@pytest.mark.parametrize("run_length", [1, 2])
def test_after_the_step_there_is_the_sum_over_the_global_batch(run_length: int) -> None:
    trains, model, loader = job(run_length)
    told = []
    for step in trains.steps(loader, until=3):
        for batch in step:
            step.add("samples", len(batch))
            step.add("samples", torch.tensor([0.5]))
            if step.micro_batch == 1:
                step.add("second", batch[0, 0])
            step.backward(model(batch).mean())
        told.append((step.epoch, step.sums))
    assert told == [
        (0, {"samples": 5.0, "second": 2.0}),
        (0, {"samples": 5.0, "second": 6.0}),
        (0, {"samples": 5.0, "second": 0.0}),
    ]


def test_the_length_of_a_loader_is_the_steps_of_an_epoch() -> None:
    _, _, loader = job()
    assert len(loader) == loader.steps_per_epoch == 3
    assert loader, "a loader is true however torch's rules for containers are"


def test_a_figure_comes_before_the_backward_that_sends_it_off_and_is_known_after_the_step() -> None:
    trains, model, loader = job()
    for step in trains.steps(loader, until=1):
        with pytest.raises(ConfigError, match=r"step\.add\('right', …\) comes inside `for batch in step`, before"):
            step.add("right", 1)
        for batch in step:
            with pytest.raises(ConfigError, match="name of 1 to 100 characters"):
                step.add("", 1)
            with pytest.raises(ConfigError, match="takes one number of the micro-batch; got a Tensor of shape"):
                step.add("right", batch)
            with pytest.raises(ConfigError, match="is not committed yet"):
                _ = step.sums
            step.backward(model(batch).mean())
            with pytest.raises(ConfigError, match=r"before the step\.backward\(loss\)"):
                step.add("right", 1)
        with pytest.raises(ConfigError, match=r"before the step\.backward\(loss\)"):
            step.add("right", 1)
        assert step.sums == {}
