"""Random numbers of a forward that no tensor shows the way of: no member may begin where it would go on with others."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

NO_VALUES = frozenset(
    {"__get__", "__len__", "dim", "is_complex", "is_floating_point", "numel", "size", "stride", "type"}
)
"""What asks a tensor for a shape or a dtype."""


@dataclass(frozen=True, kw_only=True)
class TracedDraws:
    """Where the tracing pass saw random numbers being drawn. Places are those of the graph."""

    inside: frozenset[int] = frozenset()
    """Blocks that draw from Python's or NumPy's generator."""
    between: frozenset[int] = frozenset()
    """Blocks behind which code does so; -1 is before all of them."""
    own: frozenset[int] = frozenset()
    """Blocks behind which code draws torch's numbers, as only they have them, or for fakes."""
    real: frozenset[int] = frozenset()
    """Blocks behind which code draws torch's numbers for no activation, so that every member draws some."""


class OtherDraws:
    """Draws from Python's and NumPy's generators, which are set once per micro-batch, and values that are read."""

    def __init__(self) -> None:
        self._state = state_of_others()
        self._inside: list[int] = []
        """Blocks that draw so: who does not compute them has drawn fewer."""
        self._between: list[int] = []
        self._own: list[int] = []
        self._real: list[int] = []
        self._is_behind = False
        self._read: list[int] = []
        """Blocks behind which a torch's number was drawn, as only they have it, whose value was read."""

    def look(self, at: int, *, is_inside: bool) -> None:
        """What ran since the last look was this block or, not `is_inside`, code behind it."""
        before, self._state = self._state, state_of_others()
        if before != self._state:
            (self._inside if is_inside else self._between).append(at)
            self._is_behind |= not is_inside and bool(self._inside)

    def read(self, homes: Iterable[int]) -> None:
        """Values were read that only who computes these blocks has."""
        self._read += homes

    def draw(self, at: int, *, is_own: bool, is_real: bool) -> None:
        """Code behind this block draws torch's numbers: its `own`, as only who computes it has them, or for fakes."""
        if is_own:
            self._own.append(at)
        if is_real:
            self._real.append(at)

    @property
    def traced(self) -> TracedDraws:
        inside, between, own, real = map(frozenset, (self._inside, self._between, self._own, self._real))
        return TracedDraws(inside=inside, between=between, own=own, real=real)

    def together(self, end: int) -> Iterator[tuple[int, int, str]]:
        """(first, last, why): places between which nobody may begin. `end`: the last of all; `{}` is the first's name.

        A number may be used anywhere behind the place where it is read.
        """
        if self._inside:
            last = end if self._is_behind else max(self._inside)
            yield min(self._inside), last, "block {} draws random numbers of Python or NumPy, of which more follow"
        if self._read:
            yield min(self._read), end, "behind block {} random numbers, or what it wrote, are read: do that before it"


def state_of_others() -> object:
    """Of Python's and NumPy's generators."""
    numpys: Any = np.random.get_state()
    return random.getstate(), bytes(numpys[1]), numpys[2:]
