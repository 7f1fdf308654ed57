"""accelerate's view of this process: one process by itself in a job, or a rank with the backend "elastrain".

A job's global batch does not depend on the number of members. So to accelerate and transformers the whole job is one
process, and they start no process group. Only `process_index` tells members apart: it is 0 on the main member, so that
the libraries print and write files there.

`know_elastrain` changes accelerate's `PartialState`. Both adapters call it when they are imported.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elastrain.base.processes import say
from elastrain.comm.autoload import NAME
from elastrain.integrations.adapter import current_device, require

ACCELERATE_MINIMUM = "1.10"
LONG_WORK_TIMEOUT_S = 3_600.0
"""Time that an evaluation or the writing of a checkpoint may take, before the member is taken to hang."""
_WORLD = (
    "LOCAL_RANK",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "PMI_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_SIZE",
)
"""Variables from which accelerate concludes that it should start a process group."""


def know_elastrain() -> None:
    """Let accelerate accept the backend "elastrain", and start no process group by itself in a worker of a job."""
    require("accelerate", ACCELERATE_MINIMUM)
    from accelerate import state

    partial: Any = state.PartialState
    if getattr(partial, "_knows_elastrain", False):
        return
    partial._knows_elastrain = True
    partial.__init__ = _alone_in_a_job(partial.__init__)
    partial._prepare_backend = _with_our_backend(partial._prepare_backend, state.DistributedType)


def set_rank(rank: int) -> None:
    """Tell accelerate and transformers whether this is the main member. Does nothing where they have no state yet."""
    shared = require("accelerate", ACCELERATE_MINIMUM).state.PartialState._shared_state
    if shared:
        shared.update(process_index=rank, local_process_index=rank)
        if shared["device"].type != "cpu":  # the job has chosen the worker's device
            shared["device"] = current_device()


def settle_config(model: Any) -> None:
    """Set in a transformers model's config what its `save_pretrained` sets.

    The main member saves alone, and members compare the values in the model.
    """
    config = getattr(model, "config", None)
    if config is not None and hasattr(config, "architectures") and hasattr(model, "save_pretrained"):
        config.architectures = [type(model).__name__]
        config.dtype = str(model.dtype).rpartition(".")[2]


def say_shares(micro_batches: int, members: int, what: str) -> None:
    """Say on the main member if a step has too few micro-batches for all members. `what` makes more of them."""
    if micro_batches < members:
        say(
            f"a step has {micro_batches} micro-batch{'es' * (micro_batches > 1)}, so that {members - micro_batches} of "
            f"{members} members only stand by: {what} makes more of them"
        )


def _alone_in_a_job(begin: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(begin)
    def begin_alone(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        is_worker = "ELASTRAIN_AGENT" in os.environ and kwargs.get("backend") != NAME
        with _hidden(_WORLD if is_worker else ()):
            begin(self, cpu, **kwargs)

    return begin_alone


def _with_our_backend(prepare: Callable[..., Any], types: Any) -> Callable[..., Any]:
    @functools.wraps(prepare)
    def prepare_ours(self: Any, cpu: bool = False, sagemaker_dp: bool = False, backend: str | None = None) -> Any:
        if backend != NAME:
            return prepare(self, cpu, sagemaker_dp, backend)
        # On a machine without an accelerator, accelerate would take the ranks for one process each.
        found, kind = prepare(self, cpu, sagemaker_dp, None)
        return NAME, types.MULTI_CPU if kind in (types.NO, types.MULTI_CPU) or found is None else kind

    return prepare_ours


@contextmanager
def _hidden(names: tuple[str, ...]) -> Iterator[None]:
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)
