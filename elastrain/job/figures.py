"""Figures of an evaluation: what a script's function returns for a batch, as values and as text, and their sum.

Whole numbers are added exactly, all others in float64, from the first batch to the last. So the sum has the same bits
whichever members have computed the batches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

NUMBERS_MAX = 1 << 16
"""Most numbers in the figures of a batch. They travel as text, and one member adds them between two messages."""


@dataclass(frozen=True)
class Figure:
    """A number, a tensor as the list of its numbers, or outputs of batches."""

    shape: tuple[int, ...] | None
    """None: a number."""
    numbers: tuple[float, ...] = ()
    """Whole numbers are `int`."""
    outputs: tuple[str, ...] = ()
    """Outputs of whole batches as texts, which are not added up but listed in the order of the batches."""

    # Not in the dtype of the script's tensor: sums in half precision would lose counts, and round by the batch size.
    def __add__(self, other: Figure) -> Figure:
        numbers = tuple(a + b for a, b in zip(self.numbers, other.numbers, strict=True))
        return Figure(self.shape, numbers, self.outputs + other.outputs)


Figures: TypeAlias = Mapping[str, Figure]


def written(figures: Figures) -> str:
    """Return the figures as a text, from which `read` makes the same ones: JSON keeps every bit of a float64."""
    return json.dumps({name: [each.shape, each.numbers, each.outputs] for name, each in sorted(figures.items())})


def read(text: str) -> dict[str, Figure]:
    """Return the figures of a text."""
    told: dict[str, tuple[list[int] | None, list[float], list[str]]] = json.loads(text)
    return {
        name: Figure(None if shape is None else tuple(shape), tuple(numbers), tuple(outputs))
        for name, (shape, numbers, outputs) in told.items()
    }


def difference(first: Figures, batch: int, figures: Figures) -> str:
    """Return a sentence if a batch has other names or shapes than the first batch, else ""."""
    if first.keys() != figures.keys():
        return (
            f"fn of job.evaluate(…) returned {_listed(first)} for batch 0 and {_listed(figures)} for batch {batch}: "
            "return the same names for every batch, with 0 for what a batch does not have"
        )
    for name, each in first.items():
        if each.shape != figures[name].shape:
            return (
                f"fn of job.evaluate(…) returned {name!r} with shape {_shape(each)} for batch 0 and with shape "
                f"{_shape(figures[name])} for batch {batch}: return sums over the samples of the batch"
            )
    return ""


def _listed(figures: Figures) -> str:
    return ", ".join(map(repr, sorted(figures))) or "nothing"


def _shape(figure: Figure) -> str:
    return "()" if figure.shape is None else str(figure.shape)


# In the order of the batches, because sums of floats depend on the order, and arrivals differ from job to job. What
# comes early waits as text: figures are small, and few batches of other members can be behind.
class FigureSum:
    """The sum of the figures of batches `0..batches`. Batches may come in any order, and count once."""

    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.total: Figures = {}
        self.problem = ""
        """A sentence if batches do not fit together."""
        self._folded = 0
        """Batches `0.._folded` are in the total."""
        self._later: dict[int, str] = {}
        """Batches that came before one in front of them."""

    def has(self, batch: int) -> bool:
        """Return True if the batch has come."""
        return batch < self._folded or batch in self._later

    @property
    def is_complete(self) -> bool:
        """True once all batches are in the total."""
        return self._folded == self.batches

    def missing(self) -> list[int]:
        """Return the batches that have not come, ascending."""
        return [batch for batch in range(self._folded, self.batches) if batch not in self._later]

    def add(self, batch: int, text: str) -> None:
        """Take the figures of a batch, unless it has come before. They are added once all batches before it are."""
        if self.has(batch):
            return
        self._later[batch] = text
        while not self.problem and self._folded in self._later:
            figures = read(self._later.pop(self._folded))
            self.problem = difference(self.total, self._folded, figures) if self._folded else ""
            if not self.problem:
                self.total = {n: self.total[n] + figures[n] for n in figures} if self._folded else figures
                self._folded += 1
