"""The loaders and schedulers that an accelerator's `prepare` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader

import elastrain
from elastrain.errors import ConfigError
from elastrain.integrations.script_loop import ScriptLoop
from elastrain.integrations.shared_evaluation import ReadAhead
from elastrain.runtime.loader.torch_loader import check_indexed, same_samples


class TrainingLoader:
    """The training loader of a script, which drives the steps of the job."""

    def __init__(self, given: DataLoader[Any], inner: elastrain.DataLoader, epoch: Callable[[], Iterator[Any]]) -> None:
        self.inner = inner
        self.dataset, self.batch_size = given.dataset, given.batch_size
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of batches in an epoch, which has whole steps."""
        return self.inner.steps_per_epoch * self.inner.micro_batches

    def __iter__(self) -> Iterator[Any]:
        return self._epoch()

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: the job knows its epochs."""


class EvaluationLoader:
    """Another loader of a script. Every member goes through all of its batches, and computes some of the forwards."""

    def __init__(
        self,
        given: DataLoader[Any],
        evaluating: Callable[[ReadAhead], AbstractContextManager[Iterable[Any]]],
        on_device: Callable[[Any], Any],
    ) -> None:
        self.dataset, self.batch_size = given.dataset, given.batch_size
        self._given, self._evaluating, self._on_device = given, evaluating, on_device

    def __len__(self) -> int:
        return len(self._given)

    def __iter__(self) -> Iterator[Any]:
        ahead = ReadAhead(self._given, on_device=self._on_device)
        with self._evaluating(ahead) as batches:
            yield from batches


class Scheduler:
    """A scheduler that moves once for each committed step, on all members."""

    def __init__(self, scheduler: LRScheduler, may_step: Callable[[], bool]) -> None:
        self.scheduler, self._may_step = scheduler, may_step

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Move the scheduler, unless its step is not committed yet or was skipped."""
        if self._may_step():
            self.scheduler.step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)


def job_loader(given: DataLoader[Any], per_step: int) -> elastrain.DataLoader:
    """Return the job's loader with the samples of a script's loader, of which `per_step` batches make a step.

    Raises ConfigError if the order of its samples cannot be shared out.
    """
    check_indexed(given)
    size = given.batch_size
    if size is None or type(given.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "the training loader has a batch_sampler, and all batches must have one size: give batch_size"
        )
    return same_samples(given, given.sampler, global_batch_size=size * per_step, micro_batch_size=size)


class Parts:
    """The things that a script has given to `prepare`, and what goes with them."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedulers: list[LRScheduler] = []
        self.loader: TrainingLoader | None = None
        self.loop: ScriptLoop | None = None
        self.behind = 0
        """Steps that the script's own checkpoint stands behind."""
        self.registered: list[Any] = []
        """Things of `register_for_checkpointing`."""
        self.norms: list[Tensor] = []
        """Tensors that get the norm of the step's gradient once it is committed."""


def only(what: str, first: Any, thing: Any) -> Any:
    """Return the thing. Raises ConfigError if there is a first one already."""
    if first not in (None, thing):
        raise ConfigError(f"accelerator.prepare(…) was given a second {what}: a job has one model and one optimizer")
    return thing
