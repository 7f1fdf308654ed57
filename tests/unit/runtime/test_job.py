"""A job before it trains: what its constructor leaves alone, and what calls in the wrong order say."""

from __future__ import annotations

import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import elastrain
from elastrain.base.environment import Environment, expected_place
from elastrain.errors import ConfigError
from elastrain.job.scaling import UNSCALED
from elastrain.runtime import assembly
from elastrain.runtime.assembly import Chosen
from elastrain.runtime.io.member_connections import Connections
from elastrain.runtime.job import Job
from elastrain.runtime.memory.process_memory import MemoryLimit
from elastrain.runtime.settings import Settings


def chosen(run_dir: Path | None = None) -> Chosen:
    environment = Environment(
        job="j",
        member="m0",
        node="node0",
        agent="elastrain/nobody/listens",
        secret=None,
        run_dir=run_dir,
        host=None,
        memory_limit_bytes=None,
        offload_dirs=(),
    )
    settings = Settings(seed=7, run_length=1, backups=1, loss_scale=UNSCALED, deterministic=True)
    return Chosen(environment=environment, settings=settings, limit=None)


@pytest.fixture
def hook_kept() -> Iterator[None]:
    before = sys.excepthook
    yield
    sys.excepthook = before


def test_making_a_job_opens_nothing_takes_no_hook_and_seeds_nothing(tmp_path: Path) -> None:
    hook, threads = sys.excepthook, threading.active_count()
    random.seed(1)
    drawn = random.getstate(), torch.get_rng_state()
    job = Job(chosen(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert (sys.excepthook, threading.active_count()) == (hook, threads)
    assert random.getstate() == drawn[0]
    assert torch.equal(torch.get_rng_state(), drawn[1])
    assert (job.rank, job.world_size) == (0, 1)


def test_before_its_first_view_a_worker_has_the_rank_that_its_launcher_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    alone = expected_place()
    monkeypatch.setenv("ELASTRAIN_AGENT", "elastrain/nobody/listens")
    job = Job(replace(chosen(), place=expected_place()))
    assert (alone, job.rank, job.world_size) == ((0, 1), 2, 3)
    assert (job.is_main, Job(chosen()).is_main, job.member) == (False, True, chosen().environment.member)


def test_opening_it_needs_the_launcher_that_started_it() -> None:
    job = Job(chosen())
    with pytest.raises(ConnectionError):
        job.open()


def test_a_job_that_was_never_opened_says_what_to_call() -> None:
    model = nn.Linear(2, 2)
    loader = elastrain.DataLoader([torch.zeros(2)] * 4, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"elastrain\.init\(\) makes one"):
        Job(chosen()).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def test_steps_and_digest_come_after_prepare(hook_kept: None) -> None:
    job = elastrain.init()
    loader = elastrain.DataLoader([torch.zeros(2)] * 4, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"call job\.prepare"):
        next(job.steps(loader, until=1))
    with pytest.raises(ConfigError, match=r"call job\.prepare"):
        job.digest()


def test_prepare_is_called_once_and_steps_take_its_loader(hook_kept: None) -> None:
    job = elastrain.init()
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastrain.DataLoader([torch.zeros(2)] * 4, global_batch_size=4, micro_batch_size=2, num_workers=0)
    job.prepare(model, optimizer, loader)
    with pytest.raises(ConfigError, match="a job has one model"):
        job.prepare(model, optimizer, loader)
    other = elastrain.DataLoader([torch.zeros(2)] * 4, global_batch_size=4, micro_batch_size=2)
    with pytest.raises(ConfigError, match="the loader that prepare"):
        next(job.steps(other, until=1))


MODEL = nn.Linear(2, 2)
ADAM = torch.optim.AdamW(MODEL.parameters())
DATA = elastrain.DataLoader([torch.zeros(2)] * 4, global_batch_size=4, micro_batch_size=2)
LOADER = r"the loader must be elastrain\.DataLoader\(dataset, global_batch_size=…, micro_batch_size=…\); got "
OPTIMIZER = r"the optimizer must be a torch\.optim\.Optimizer of the model's parameters; got "


@pytest.mark.parametrize(
    ("model", "optimizer", "loader", "said"),
    [
        (MODEL, ADAM, [torch.zeros(2)], rf"{LOADER}builtins\.list$"),
        (MODEL, ADAM, None, rf"{LOADER}builtins\.NoneType$"),
        (MODEL, list(MODEL.parameters()), DATA, rf"{OPTIMIZER}builtins\.list$"),
        (MODEL, torch.optim.AdamW, DATA, OPTIMIZER + r"the class AdamW$"),
        (MODEL, torch.optim.lr_scheduler.StepLR(ADAM, 1), DATA, OPTIMIZER + r"torch\.optim\.lr_scheduler\.StepLR$"),
        (ADAM, MODEL, DATA, r"the model must be a torch\.nn\.Module; got torch\.optim\.adamw\.AdamW$"),
        (nn.Linear, ADAM, DATA, r"got the class Linear$"),
    ],
)
def test_prepare_says_which_of_its_arguments_is_something_else(
    model: Any, optimizer: Any, loader: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=r"^job\.prepare\(model, optimizer, loader\): " + f".*{said}"):
        Job(chosen()).prepare(model, optimizer, loader)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"blocks": "layers"}, "blocks must be a list of names of submodules; got 'layers'"),
        ({"blocks": [1]}, r"blocks must be a list of names of submodules; got \[1\]"),
        ({"max_grad_norm": "1.0"}, "max_grad_norm must be a number above 0; got '1.0'"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm must be a number above 0; got nan"),
    ],
)
def test_prepare_says_which_of_its_options_is_something_else(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Job(chosen()).prepare(MODEL, ADAM, DATA, **options)


@pytest.mark.parametrize("until", ["3", None])
def test_steps_says_that_its_end_is_no_number(until: Any) -> None:
    with pytest.raises(ConfigError, match="until must be a number of steps; got "):
        next(Job(chosen()).steps(DATA, until=until))


def test_a_job_of_one_trains_to_its_end_and_gives_the_hook_back(hook_kept: None) -> None:
    hook = sys.excepthook
    job = elastrain.init(seed=3)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = [torch.randn(2) for _ in range(8)]
    loader = elastrain.DataLoader(data, global_batch_size=4, micro_batch_size=2, num_workers=0)
    job.prepare(model, optimizer, loader)
    numbers = []
    for step in job.steps(loader, until=2):
        for batch in step:
            step.backward(model(batch).square().mean())
        numbers.append((step.number, step.samples))
    assert numbers == [(0, 4), (1, 4)]
    assert sys.excepthook is hook
    with pytest.raises(ConfigError, match="a job has one loop: let it go up to the last step"):
        next(job.steps(loader, until=4))


def test_a_worker_enters_once(monkeypatch: pytest.MonkeyPatch, hook_kept: None) -> None:
    monkeypatch.setattr(Job, "has_entered", True)
    elastrain.init()  # alone under python, as in a notebook
    monkeypatch.setenv("ELASTRAIN_AGENT", "elastrain/nobody/listens")
    with pytest.raises(ConfigError, match=r"elastrain\.init\(\) was called before: a worker has one job"):
        elastrain.init()


def test_a_reserved_name_cannot_be_registered() -> None:
    with pytest.raises(ConfigError, match="registered already, or a name of the job's own"):
        Job(chosen()).register("layers", {"x": 1})


def test_what_init_has_fixed_is_frozen() -> None:
    for kind in (Chosen, Connections, assembly.Prepared, assembly.Request, MemoryLimit):
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stages", "options", "sentence"),
    [
        ("0", {}, "whole number from 1 on"),
        ("2", {"cross_check_every": 5}, "another could compare"),
        ("2", {"stages": 3}, r"--stages 2 and init\(stages=3\) ask for different pipelines"),
        ("2", {"stages": 2, "cross_check_every": 5}, "another could compare"),
        ("", {"stages": True}, "whole number from 1 on, or 'auto'; got True"),
        ("", {"stages": "all"}, "whole number from 1 on, or 'auto'; got 'all'"),
        ("auto", {"stages": 2}, r"--stages auto and init\(stages=2\) ask for different pipelines"),
        ("auto", {"cross_check_every": 5}, "another could compare"),
        ("", {"stages": 2, "cross_check_every": 5}, "another could compare"),
    ],
)
def test_stages_that_cannot_be_are_refused(
    hook_kept: None, monkeypatch: pytest.MonkeyPatch, stages: str, options: dict[str, Any], sentence: str
) -> None:
    monkeypatch.setenv("ELASTRAIN_STAGES", stages)
    with pytest.raises(ConfigError, match=sentence):
        elastrain.init(**options)


@pytest.mark.parametrize("limit", [0, 0.0, -1, False, True, float("nan"), "4G"])
@pytest.mark.parametrize("name", ["memory_limit", "host_memory_limit", "host_tier"])
def test_a_limit_that_is_no_number_of_bytes_is_refused_although_the_launcher_gave_one(
    hook_kept: None, monkeypatch: pytest.MonkeyPatch, name: str, limit: Any
) -> None:
    for variable in ("MEMORY_LIMIT", "HOST_MEMORY_LIMIT", "HOST_TIER"):
        monkeypatch.setenv(f"ELASTRAIN_{variable}", str(64 << 30))
    flag = "--" + name.replace("_", "-")
    sentence = (
        f"{name} must be a positive number of bytes; got {limit!r}: leave it out to have the one of elastrain run"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(sentence)} {flag}, or none$"):
        elastrain.init(**{name: limit})


def test_a_tier_without_a_limit_of_the_device_is_refused(hook_kept: None) -> None:
    with pytest.raises(ConfigError, match="--host-tier is host memory for what a limit of device memory leaves no"):
        elastrain.init(host_memory_limit=1 << 30, host_tier=1 << 20)


def test_an_average_of_the_model_is_refused_with_stages_before_the_loop_begins() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    registered = {"head": nn.Linear(2, 1), "average": torch.optim.swa_utils.AveragedModel(model)}
    settings = Settings(seed=7, run_length=1, backups=1, loss_scale=UNSCALED, deterministic=True)
    settings.check_registered(model, registered)
    staged = replace(settings, stages=2)
    with pytest.raises(ConfigError, match=r"^'average' is registered and has the parameters of the model"):
        staged.check_registered(model, registered)
    staged.check_registered(model, {"head": registered["head"], "counts": {"samples": 1}})


def test_audits_and_pipelines_exclude_one_another(hook_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTRAIN_STAGES", "2")
    with pytest.raises(ConfigError, match="another could compare"):
        elastrain.init().audit(3)
