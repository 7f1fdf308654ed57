"""Tests of what the adapters refuse before anything is started, and of what accelerate takes the process for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastrain.errors import ConfigError
from elastrain.integrations import adapter

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(autouse=True)
def _apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "_claimed", None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deepspeed_plugin", object()),
        ("fsdp_plugin", object()),
        ("megatron_lm_plugin", object()),
        ("parallelism_config", object()),
        ("dynamo_backend", "inductor"),
        ("kwargs_handlers", [object()]),
    ],
)
def test_an_accelerator_refuses_by_name_what_has_no_meaning_in_a_job(name: str, value: Any) -> None:
    from elastrain.integrations.accelerate import Accelerator

    with pytest.raises(ConfigError, match=rf"Accelerator\({name}=…\) has no meaning in a job"):
        Accelerator(**{name: value})


def test_an_accelerator_refuses_a_tracker_that_cannot_go_on() -> None:
    from elastrain.integrations.accelerate import Accelerator

    with pytest.raises(ConfigError, match="log_with='mlflow' cannot go on"):
        Accelerator(log_with="mlflow")


@pytest.mark.parametrize("name", ["push_to_hub", "auto_find_batch_size", "torch_empty_cache_steps"])
def test_a_trainer_refuses_by_name_what_has_no_meaning_in_a_job(name: str, tmp_path: Any) -> None:
    from elastrain.integrations.transformers import Trainer

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    setattr(args, name, 1)
    with pytest.raises(ConfigError, match=rf"TrainingArguments\({name}=1\) has no meaning in a job, because"):
        Trainer(model=torch.nn.Linear(1, 1), args=args)


@pytest.mark.parametrize("name", ["deepspeed", "fsdp"])
def test_a_trainer_refuses_sharding_of_others(name: str, tmp_path: Any) -> None:
    from elastrain.integrations.transformers import Trainer

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    setattr(args, name, "full_shard")
    with pytest.raises(ConfigError, match=rf"TrainingArguments\({name}='full_shard'\) .* shards the optimizer's state"):
        Trainer(model=torch.nn.Linear(1, 1), args=args)


def test_a_trainer_refuses_a_method_that_it_would_never_call(tmp_path: Any) -> None:
    from elastrain.integrations.transformers import Trainer

    class Mine(Trainer):
        def training_step(self, *_: Any) -> Any:
            raise AssertionError

    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(ConfigError, match="Mine overrides training_step, which a job does not call"):
        Mine(model=torch.nn.Linear(1, 1), args=args)


def test_accelerate_takes_a_worker_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastrain.integrations.process_state import know_elastrain

    know_elastrain()
    for name, value in {"ELASTRAIN_AGENT": "x", "LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        state = accelerate.PartialState(cpu=True)
        assert (state.num_processes, state.backend) == (1, None)
        assert not torch.distributed.is_initialized()
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("cpu", [True, False])
def test_accelerate_accepts_the_backend(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    from elastrain.integrations.process_state import know_elastrain

    know_elastrain()
    places = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in places.items():
        monkeypatch.setenv(name, value)
    begun: list[Any] = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **kwargs: begun.append(kwargs["backend"]))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        state = accelerate.PartialState(cpu=cpu, backend="elastrain")
        assert state.backend == "elastrain" and set(begun) == {"elastrain"}
        assert state.distributed_type == accelerate.DistributedType.MULTI_CPU
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
