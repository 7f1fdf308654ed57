"""Batches of a dataset that members evaluate, with the script's function of a batch, and its figures as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from elastrain.errors import ConfigError
from elastrain.job.figures import NUMBERS_MAX, Figure, read, written
from elastrain.runtime.broadcast import from_text, to_text
from elastrain.runtime.loader.loader_arguments import check_collate

SUMS, OUTPUTS = "job.evaluate(…)", "job.predict(…)"
_OUTPUTS = "outputs"
_FIRST_PART, _LARGEST_PART, _PART_BYTES = 8, 256, 8 << 20


@dataclass(frozen=True, kw_only=True)
class Batches:
    """The batches of a dataset, and the script's function of a batch. Raises ConfigError on bad arguments."""

    call: str
    """The call, as scripts write it: SUMS or OUTPUTS."""
    fn: Callable[[Any], Any]
    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    first: int = 0
    """Number of the first batch, if these are a part of all batches."""
    from_rank: int | None = None

    def __post_init__(self) -> None:
        check_collate(self.collate)
        if not callable(self.fn):
            raise ConfigError(f"fn of {self.call} must be callable; got {type(self.fn).__name__}")
        if not (isinstance(self.dataset, Sized) and hasattr(self.dataset, "__getitem__")):
            raise ConfigError(
                f"{self.call} takes a dataset with __getitem__ and __len__; got {type(self.dataset).__name__}: "
                "make a list of the samples, or a dataset that reads them by index"
            )
        if not isinstance(self.batch_size, int) or isinstance(self.batch_size, bool) or self.batch_size < 1:
            raise ConfigError(f"batch_size of {self.call} must be a whole number from 1 on; got {self.batch_size!r}")
        if not len(self.dataset):
            raise ConfigError(f"the dataset of {self.call} has no samples")

    @property
    def count(self) -> int:
        """Number of batches."""
        return -(-len(self.dataset) // self.batch_size)

    @property
    def plan(self) -> str:
        """Data and batches, in words; equal on all members."""
        return f"{self.call} on {len(self.dataset)} samples in batches of {self.batch_size}"

    def load(self, batch: int) -> Any:
        """Return a batch as `fn` gets it."""
        first = batch * self.batch_size
        with torch.device("cpu"):  # as a loader's process does
            samples = [self.dataset[i] for i in range(first, min(first + self.batch_size, len(self.dataset)))]
            return (self.collate or default_collate)(samples)

    def figures(self, batch: int) -> str:
        """Compute a batch, and return its figures as text. Raises ConfigError if `fn` returned something else."""
        found = self.fn(self.load(batch))
        if self.call == SUMS:
            return _sums(found, batch)
        what = f"what fn of job.predict(…) returned for batch {self.first + batch}"
        return written({_OUTPUTS: Figure(None, outputs=(to_text(found, what),))})

    def part(self, first: int, largest_bytes: int) -> Batches:
        """Return the batches from `first` on that are computed next.

        Args:
            first: Number of the batch behind those whose outputs are known.
            largest_bytes: The most bytes of the output of a batch until now; 0: none is known.
        """
        count = min(_LARGEST_PART, max(1, _PART_BYTES // largest_bytes)) if largest_bytes else _FIRST_PART
        end = min((first + count) * self.batch_size, len(self.dataset))
        return replace(self, dataset=Subset(self.dataset, range(first * self.batch_size, end)), first=first)


def _sums(found: Any, batch: int) -> str:
    """Return the sums of a batch as text. Raises ConfigError if they are no numbers by name."""
    if not isinstance(found, Mapping) or not found or not all(isinstance(name, str) for name in found):
        raise ConfigError(
            f"fn of job.evaluate(…) must return a dict of sums by name, such as {{'correct': n}}; got "
            f"{found!r:.100} for batch {batch}"
        )
    figures = {name: _figure(name, value) for name, value in found.items()}
    if (count := sum(len(each.numbers) for each in figures.values())) > NUMBERS_MAX:
        raise ConfigError(
            f"fn of job.evaluate(…) returned {count} numbers for batch {batch}; at most {NUMBERS_MAX} travel: "
            "return sums over the samples, not a value for each (job.predict returns outputs of batches)"
        )
    return written(figures)


def outputs_of(figures: str, device: torch.device) -> tuple[list[Any], int]:
    """Return the outputs of all batches of these figures, and the most bytes that one of them took as text."""
    texts = read(figures)[_OUTPUTS].outputs
    return [from_text(text, device) for text in texts], max(map(len, texts))


def _figure(name: str, value: Any) -> Figure:
    """Return what `fn` gave for a name as a figure. Raises ConfigError if these are no real numbers."""
    if isinstance(value, np.ndarray | np.generic):
        value = torch.as_tensor(value) if value.dtype.kind in "biuf" else value
    if isinstance(value, bool | int) and abs(value) < 1 << 63:
        return Figure(None, (int(value),))
    if isinstance(value, float):
        return Figure(None, (float(value),))
    if not isinstance(value, Tensor) or value.is_complex():
        raise ConfigError(
            f"fn of job.evaluate(…) returned {value!r:.100} as {name!r}: return real numbers, or tensors of them"
        )
    numbers = value.detach().to("cpu", torch.float64 if value.is_floating_point() else torch.int64)
    return Figure(tuple(value.shape) or None, tuple(numbers.reshape(-1).tolist()))


def plain(figure: Figure) -> int | float | Tensor:
    """Return a sum as scripts get it."""
    if figure.shape is None:
        return figure.numbers[0]
    is_whole = figure.numbers and all(isinstance(each, int) for each in figure.numbers)
    return torch.tensor(figure.numbers, dtype=torch.int64 if is_whole else torch.float64).reshape(figure.shape)
