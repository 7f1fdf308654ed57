"""Schedulers are found whatever the garbage collector shows, and none is missed without a word."""

from __future__ import annotations

import copy
import gc
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from elastrain.errors import ConfigError
from elastrain.runtime.loop_state.layers import Layers
from elastrain.runtime.loop_state.loop_state import LoopState
from elastrain.runtime.loop_state.schedulers import FirstSettings, schedulers_of

Optimizer = torch.optim.Optimizer


class OwnInit(lr_scheduler.LRScheduler):
    """Calls no __init__ of torch's."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer


MADE: dict[str, Callable[[Optimizer], Any]] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=200),
    "plateau": lr_scheduler.ReduceLROnPlateau,
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(o, 3), lr_scheduler.ExponentialLR(o, 0.9)]),
    "a copy": lambda o: copy.copy(lr_scheduler.StepLR(o, 3)),
    "one's own": OwnInit,
}


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def _optimizer() -> Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.05)


@pytest.mark.parametrize("kind", MADE)
def test_a_scheduler_that_the_collector_does_not_show_is_found(kind: str) -> None:
    optimizer = _optimizer()
    scheduler = MADE[kind](optimizer)
    before = schedulers_of(optimizer)
    assert any(each is scheduler for each in before)
    gc.freeze()
    assert [id(each) for each in schedulers_of(optimizer)] == [id(each) for each in before]


@pytest.mark.slow
def test_a_frozen_scheduler_that_is_older_than_the_runtime_is_found_and_all_stays_frozen() -> None:
    script = """
import gc, torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.05)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
gc.freeze()
from elastrain.runtime.loop_state.schedulers import FirstSettings, schedulers_of
assert schedulers_of(optimizer) == [scheduler]
assert gc.get_freeze_count() > 0
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_scheduler_that_is_gone_is_not_found() -> None:
    optimizer = _optimizer()
    lr_scheduler.StepLR(optimizer, 3)
    assert schedulers_of(optimizer) == []


def test_a_scheduler_that_is_made_in_the_loop_is_refused_by_name() -> None:
    optimizer, other = _optimizer(), _optimizer()
    kept = [lr_scheduler.StepLR(optimizer, 3)]
    loop = LoopState(optimizer, {}, torch.nn.Linear(1, 1), Layers(torch.nn.Identity()))
    kept.append(lr_scheduler.StepLR(other, 3))
    loop.take([{}])
    kept.append(lr_scheduler.ExponentialLR(optimizer, 0.5))
    with pytest.raises(ConfigError, match="ExponentialLR, a scheduler of the optimizer, was made in the loop"):
        loop.take([{}])


def _course(rates: list[float], before: FirstSettings | None = None, entered: float | None = None) -> FirstSettings:
    """Hyperparameters of so many steps; `before`: of the life that wrote the checkpoint."""
    course = FirstSettings()
    if before is not None:
        course.first = before.first
        course.resume(json.dumps({} if entered is None else {"entered": [{"lr": entered, "step": 3}]}))
    for number, rate in enumerate(rates):
        course.enter([{"lr": rate, "step": 3 + number}], {"step"})
    return course


RATES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.5]


@pytest.mark.parametrize(
    ("after", "entered"),
    [
        ([0.5, 0.6, 0.5], 0.5),
        ([0.1, 0.2, 0.3], 0.1),
        ([0.5, 0.5, 0.5], 0.5),
        ([0.4, 0.2, 0.1], 0.4),
        ([0.5, 0.6], None),
    ],
    ids=["goes on", "of a period that ends here", "constant", "down past the beginning", "an older checkpoint"],
)
def test_a_schedule_that_goes_on_after_a_resume_is_let_alone(after: list[float], entered: float | None) -> None:
    _course(after, _course(RATES), entered)


@pytest.mark.parametrize(
    ("after", "what"),
    [
        ([0.1], "lr of parameter group 0 is 0.1, not 0.5"),
        ([0.5, 0.2, 0.3], "are what they were in the job's first steps"),
    ],
    ids=["set before the micro-batches", "set behind them"],
)
def test_a_schedule_of_the_scripts_own_that_begins_anew_is_named(after: list[float], what: str) -> None:
    with pytest.raises(ConfigError, match=f"the loop sets other hyperparameters than before it was resumed .*{what}"):
        _course(after, _course(RATES), 0.5)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_job_that_is_resumed_after_its_first_steps_goes_on(steps: int) -> None:
    """A checkpoint of an early step, or one of a release that kept nothing of this, has too little to compare with."""
    before = _course(RATES[:steps])
    _course(RATES[steps : steps + 3], before, RATES[steps])


def test_a_schedule_that_begins_anew_is_named_after_a_resume_from_the_second_step() -> None:
    """The rate of step 2, with which the job goes on, completes the first steps: 0.2 and 0.3 follow it again."""
    before = _course(RATES[:2])
    with pytest.raises(ConfigError, match="are what they were in the job's first steps"):
        _course([0.3, 0.2, 0.3], before, 0.3)
