"""Arguments of torch's `DataLoader`: those that elastrain's takes are checked here, the others are refused by name.

Samplers are read once, when the loader is made. Every member has to list the same samples, which they compare.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import torch
from torch.utils.data import DistributedSampler
from torch.utils.data._utils import worker as torch_worker

from elastrain.errors import ConfigError
from elastrain.job.batch import DataOrder
from elastrain.job.streams import StreamOrder
from elastrain.runtime.loader.loading import Load, here

_REFUSED = {
    "batch_size": "one worker's batch says nothing of a job whose workers come and go: give global_batch_size (samples "
    "per step) and micro_batch_size (samples that a worker computes at once)",
    "multiprocessing_context": "loader processes are forks of a server of the job's own, which outlives none of its "
    "workers: leave it out",
    "pin_memory_device": "batches are pinned for the device of the model: leave it out",
    "in_order": "the bits of a job depend on the order of its batches: leave it out",
}
"""Arguments of torch's loader that are refused -> reason."""
_HARMLESS = {"multiprocessing_context": (None, "fork"), "pin_memory_device": ("",), "in_order": (True,)}
"""Values of refused arguments that change nothing."""
_UNKNOWN_LENGTH_MOST = 1 << 16
"""Maximum number of indices, for each sample of the dataset, of a sampler that has no length."""


@dataclass(frozen=True)
class Loading:
    """The arguments of a loader that say how it loads, and change no bit of what it loads."""

    num_workers: int = 1
    prefetch: int = 2
    timeout_s: float = 0.0
    """Seconds to wait for a micro-batch from a loader process; 0: without an end."""
    worker_init_fn: Callable[[int], object] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.num_workers, int) or isinstance(self.num_workers, bool) or self.num_workers < 0:
            raise ConfigError(f"num_workers must be a whole number of at least 0; got {self.num_workers!r}")
        if not isinstance(self.timeout_s, int | float) or isinstance(self.timeout_s, bool) or not self.timeout_s >= 0:
            raise ConfigError(f"timeout must be a number of seconds from 0 on; got {self.timeout_s!r}")
        if self.worker_init_fn is not None and not callable(self.worker_init_fn):
            raise ConfigError(f"worker_init_fn must be callable; got {type(self.worker_init_fn).__name__}")


def check_switches(**switches: Any) -> None:
    """Raise ConfigError unless each of these arguments is True or False."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be True or False; got {value!r}")


def check_collate(collate_fn: Any) -> None:
    """Raise ConfigError unless this can be called, or is None."""
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(f"collate_fn must be callable; got {type(collate_fn).__name__}")


def check_refused(others: Mapping[str, Any]) -> None:
    """Refuse further arguments: those of torch's loader by ConfigError with the reason, unknown ones by TypeError."""
    for name, value in others.items():
        if name not in _REFUSED:
            raise TypeError(f"DataLoader.__init__() got an unexpected keyword argument {name!r}")
        if not any(value is each or value == each for each in _HARMLESS.get(name, ())):
            raise ConfigError(f"elastrain.DataLoader does not take {name}={value!r}: {_REFUSED[name]}")


def prefetch_of(prefetch: int | None, factor: int | None) -> int:
    """Return the micro-batches that a process loads ahead, given by either name. Raises ConfigError if they differ."""
    if prefetch is not None and factor is not None and prefetch != factor:
        raise ConfigError(f"prefetch={prefetch!r} and prefetch_factor={factor!r} are one argument: leave one out")
    given = next((each for each in (prefetch, factor) if each is not None), 2)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        name = "prefetch" if factor is None else "prefetch_factor"
        raise ConfigError(f"{name} must be a whole number of at least 1; got {given!r}")
    return given


def seed_of(generator: Any) -> int | None:
    """Return the seed of the data order that torch's argument `generator` stands for, if it is given."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(f"generator must be a torch.Generator; got {type(generator).__name__}")
    return None if generator is None else int(generator.initial_seed())


@dataclass(frozen=True, kw_only=True)
class OrderChoice:
    """The arguments that choose the samples and their order."""

    shuffle: bool | None = None
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False

    def order(self, size: int, global_batch_size: int, micro_batch_size: int | None) -> DataOrder:
        """Return the order of the samples of a dataset of this size. Samplers are listed here.

        Raises ConfigError for samplers that have no end, list no samples of the dataset, or have batches of two sizes.
        """
        samples, batch = self._listed(size)
        if batch and micro_batch_size not in (None, batch):
            raise ConfigError(
                f"batch_sampler gives batches of {batch} samples, and micro_batch_size={micro_batch_size}"
            )
        return DataOrder(
            dataset_size=size,
            global_batch_size=global_batch_size,
            micro_batch_size=batch or micro_batch_size,  # type: ignore[arg-type] # it is checked there
            shuffle=samples is None and self.shuffle is not False,
            drop_last=self.drop_last,
            listed=samples,
        )

    def of_streams(self, streams: int, global_batch_size: int, micro_batch_size: int | None) -> StreamOrder:
        """Return the places of micro-batches in streams. Raises ConfigError if indices were chosen."""
        if self.given:
            raise ConfigError(f"{self.given[0]} chooses samples by index, but streams={streams} are read in order")
        return StreamOrder(
            streams=streams,
            global_batch_size=global_batch_size,
            micro_batch_size=micro_batch_size,  # type: ignore[arg-type] # it is checked there
            drop_last=self.drop_last,
        )

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the arguments that choose an order of indices."""
        found = {"sampler": self.sampler, "batch_sampler": self.batch_sampler, "shuffle=True": self.shuffle or None}
        return tuple(name for name, each in found.items() if each is not None)

    def _listed(self, size: int) -> tuple[Sequence[int] | None, int]:
        """Return the samples of each epoch, if a sampler lists them, and the batch sampler's batch size or 0."""
        if len(self.given) > 1:
            first, second, *_ = self.given
            raise ConfigError(f"{first} and {second} both choose the order of the samples: leave one out")
        if self.sampler is not None:
            return array("q", _indices("sampler", _finite("sampler", self.sampler, size), size)), 0
        if self.batch_sampler is None:
            return None, 0
        return listed_batches(self.batch_sampler, size)


def listed_batches(batch_sampler: Any, size: int) -> tuple[Sequence[int], int]:
    """Return the samples that a batch sampler lists for a dataset of this size, in order, and the size of its batches.

    Raises ConfigError if the batches have two sizes, or the sampler has no end or lists no samples of the dataset.
    """
    batches = [_indices("batch_sampler", batch, size) for batch in _finite("batch_sampler", batch_sampler, size)]
    sizes = sorted({len(batch) for batch in batches})
    if len(sizes) > 1 or 0 in sizes:
        raise ConfigError(
            f"batch_sampler gives batches of {sizes[0]} and {sizes[-1]} samples, but all micro-batches have one "
            "size: give it drop_last=True"
        )
    return array("q", (sample for batch in batches for sample in batch)), sizes[0]


def _finite(name: str, sampler: Any, size: int) -> Iterable[Any]:
    if not hasattr(sampler, "__iter__"):
        raise ConfigError(f"{name} must be iterable; got {type(sampler).__name__}")
    if isinstance(sampler, DistributedSampler):
        raise ConfigError(
            f"{name} is a DistributedSampler, which lists one worker's share, but the job shares out the batches "
            "itself: leave it out (shuffle=True shuffles each epoch)"
        )
    try:
        most = len(sampler)
    except TypeError:
        most = _UNKNOWN_LENGTH_MOST * max(size, 1)
    found = list(islice(sampler, most + 1))
    if len(found) > most:
        raise ConfigError(f"{name} gives more than {most} items; it has to end, because its order is taken once")
    if not found:
        raise ConfigError(f"{name} is empty")
    return found


def _indices(name: str, items: Any, size: int) -> list[int]:
    try:
        found = [index(each) for each in items]
    except TypeError:
        raise ConfigError(f"{name} must give indices of samples (whole numbers); got {items!r:.80}") from None
    wrong = next((each for each in found if not 0 <= each < size), None)
    if wrong is not None:
        raise ConfigError(f"{name} gives sample {wrong}, but the dataset has the samples 0 to {size - 1}")
    return found


@contextmanager
def as_worker(number: int, count: int, seed: int, dataset: Any) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` say inside that this is loader process `number` of `count`."""
    kept = torch_worker._worker_info
    torch_worker._worker_info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=dataset)
    try:
        yield
    finally:
        torch_worker._worker_info = kept


class Initiated:
    """A function that loads a micro-batch, and calls `worker_init_fn` first where a loader process has not yet."""

    def __init__(self, load: Load, loading: Loading, dataset: Any) -> None:
        self._load, self._loading, self._dataset = load, loading, dataset
        self._is_due = loading.worker_init_fn is not None

    def __call__(self, step: int, micro_batch: int) -> Any:
        """Return the collated micro-batch. If `worker_init_fn` raises, so does each micro-batch of this process."""
        if self._is_due:
            assert self._loading.worker_init_fn is not None
            with as_worker(here.get(), self._loading.num_workers, 0, self._dataset):
                self._loading.worker_init_fn(here.get())
            self._is_due = False
        return self._load(step, micro_batch)
