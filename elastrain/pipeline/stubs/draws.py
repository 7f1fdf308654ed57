"""Checks of random numbers in pipelines: members must draw the same numbers as one worker would.

`OtherDraws` records the draws of a tracing pass, and the stretches that no cut may divide because of them.
`UntracedDraws` refuses a draw in a forward that the tracing pass did not see, such as one in every third micro-batch:
the legal cuts do not account for it. `BackwardDraws` refuses draws in a backward that differ from those of one worker.
In one worker a backward follows its forward and continues its random streams. A member without the loss computes other
micro-batches in between, and lacks the draws of later blocks.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.generators import Generators

NO_VALUES = frozenset(
    {"__get__", "__len__", "dim", "is_complex", "is_floating_point", "numel", "size", "stride", "type"}
)
"""Names of functions that return no value of a tensor, only its shape, dtype or the like."""


@dataclass(frozen=True, kw_only=True)
class TracedDraws:
    """Places in the block graph where the tracing pass saw draws of random numbers."""

    inside: frozenset[int] = frozenset()
    """Blocks that draw from Python's or NumPy's generator."""
    between: frozenset[int] = frozenset()
    """Blocks after which code between blocks draws from these generators; -1 means before all blocks."""
    own: frozenset[int] = frozenset()
    """Blocks after which code draws torch's numbers for activations, or with a stream that only members with the block
    have.
    """
    real: frozenset[int] = frozenset()
    """Blocks after which code draws torch's numbers that no activation goes into, so that every member draws them."""


class OtherDraws:
    """A record of the random draws in a tracing pass, and of the values read.

    Python's and NumPy's generators are seeded once for each micro-batch.
    """

    def __init__(self) -> None:
        self._state = state_of_others()
        self._inside: list[int] = []
        """Blocks that draw from them. A member that does not compute such a block has drawn fewer numbers."""
        self._between: list[int] = []
        self._own: list[int] = []
        self._real: list[int] = []
        self._is_behind = False
        self._read: list[int] = []
        """Blocks after which a value was read that only members with the block have: a random number, or what it wrote.
        """

    def look(self, at: int, *, is_inside: bool) -> None:
        """Check for draws since the last call: in block `at` if `is_inside`, else in code behind it."""
        before, self._state = self._state, state_of_others()
        if before != self._state:
            (self._inside if is_inside else self._between).append(at)
            self._is_behind |= not is_inside and bool(self._inside)

    def read(self, homes: Iterable[int]) -> None:
        """Note that values were read that only members with these blocks have."""
        self._read += homes

    def draw(self, at: int, *, is_own: bool, is_real: bool) -> None:
        """Note that code behind block `at` draws torch's numbers.

        Args:
            at: Place of the last block that was entered.
            is_own: True if only members that compute the block draw these numbers, or if they are drawn for
                activations.
            is_real: True if no activation goes in, so that every member draws.
        """
        if is_own:
            self._own.append(at)
        if is_real:
            self._real.append(at)

    @property
    def traced(self) -> TracedDraws:
        """The draws that were seen so far."""
        inside, between, own, real = map(frozenset, (self._inside, self._between, self._own, self._real))
        return TracedDraws(inside=inside, between=between, own=own, real=real)

    def together(self, end: int) -> Iterator[tuple[int, int, str]]:
        """Yield (first, last, why): no cut may lie between the first and the last block.

        `end` is the place of the last block of all. `{}` in `why` stands for the name of the first block. A number may
        be used anywhere behind the place where it is read.
        """
        if self._inside:
            last = end if self._is_behind else max(self._inside)
            yield min(self._inside), last, "block {} draws random numbers of Python or NumPy, of which more follow"
        if self._read:
            yield min(self._read), end, "behind block {} random numbers, or what it wrote, are read: do that before it"


def state_of_others() -> object:
    """Return the state of Python's and NumPy's generators."""
    numpys: Any = np.random.get_state()
    return random.getstate(), bytes(numpys[1]), numpys[2:]


_WORDS = 624
"""Words of NumPy's Mersenne Twister state. The position in it is stored behind them."""


@dataclass(frozen=True)
class _Left:
    """A block that was left, and the states of the generators at that moment."""

    place: int
    others: object
    torchs: tuple[bytes, ...] | None = None
    """States of torch's generators, or None if draws behind the block are allowed."""


class UntracedDraws:
    """A check, at the blocks of a pass, for draws that the tracing pass did not see. Its methods raise ConfigError."""

    def __init__(self, blocks: Sequence[str], traced: TracedDraws, generators: Generators) -> None:
        self._blocks, self._traced = tuple(blocks), traced
        self._generators, self._torchs = generators, generators.states
        self._others = state_of_others if traced.inside or traced.between else first_draw
        first = min(traced.inside, default=len(blocks))
        self._alike_up_to = len(blocks) if any(place >= first for place in traced.between) else first
        """From this block on members may differ in Python's and NumPy's numbers, and the traced code between blocks
        drew none.
        """
        self._may_draw = {*traced.own, len(blocks) - 1}
        self._for_fakes = traced.own - traced.real
        """Blocks behind which code drew only for activations. On members where these are fakes it draws nothing."""
        self._left: _Left | None = None

    def behind(self) -> None:
        """Check for draws since the last block: another block is about to be entered, or the loss has been made."""
        left, self._left = self._left, None
        if left is None:
            return
        if left.torchs not in (None, self._torchs()):
            raise self._refusal(f"code behind block {self._blocks[left.place]!r} drew random numbers of torch")
        if left.place >= self._alike_up_to and self._others() != left.others:
            raise self._refusal(f"code behind block {self._blocks[left.place]!r} drew numbers of Python or NumPy")

    def in_backward(self, stretch: range) -> BackwardDraws:
        """Return the check of the backward of these blocks. The forward is over."""
        return BackwardDraws(self._blocks, stretch, self._traced, self._generators)

    def passed(self, place: int) -> None:
        """Note that the forward entered a block that another member computes."""
        is_for_fakes = place in self._for_fakes
        if is_for_fakes or place >= self._alike_up_to:
            self._left = _Left(place, self._others(), self._torchs() if is_for_fakes else None)

    def computed(self, place: int, compute: Callable[[], Any], *, is_traced: bool = True) -> Any:
        """Compute the block and return its result.

        `is_traced` is False if the block is a neighbour of this place that the tracing pass left out.
        """
        torchs, others = self._torchs(), self._others()
        returned = compute()
        now = self._torchs()
        is_known = now == torchs or (is_traced and place in self._may_draw)
        self._left = _Left(place, self._others(), None if is_known else now)
        if place not in self._traced.inside and self._left.others != others:
            raise self._refusal(f"block {self._blocks[place]!r} drew random numbers of Python or NumPy")
        return returned

    @staticmethod
    def _refusal(what: str) -> ConfigError:
        return ConfigError(
            f"{what} in this micro-batch and not in the tracing pass, so that members which compute other blocks may "
            "draw others: draw in every micro-batch, before all blocks, or torch's numbers inside of a block"
        )


def first_draw() -> object:
    """Return a value that changes as soon as Python's or NumPy's generator is drawn from after both were seeded.

    It avoids a copy of NumPy's state, which takes 40 microseconds, because a forward has many blocks.
    """
    numpys: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # of its own list of names
    if not isinstance(numpys, np.random.MT19937):
        return state_of_others()
    state = (ctypes.c_uint32 * (_WORDS + 1)).from_address(numpys.ctypes.state_address)
    # The first word is included: after a draw of all words the position is the same again.
    return random.getstate(), state[0], state[_WORDS]


class BackwardDraws:
    """A check of one micro-batch's random draws between the end of its forward and the end of its backward.

    A checkpoint repeats the draws of its forward if it keeps torch's state, or if it begins with a block, which sets
    its own stream. Python's and NumPy's numbers continue from the forward if this member has all blocks that draw them.
    """

    def __init__(self, blocks: Sequence[str], stretch: range, traced: TracedDraws, generators: Generators) -> None:
        """Keep the generators' states after a forward. `stretch`: places of the blocks that this member computes."""
        self._blocks = tuple(blocks[place] for place in stretch)
        self._is_last = stretch.stop == len(blocks)
        has_drawn = bool(traced.inside) and all(place in stretch for place in traced.inside)
        self._goes_on = has_drawn or (self._is_last and not traced.inside)
        """True if, after the forward, Python's and NumPy's generators have the state that they would have in one
        worker.
        """
        self._kept: Any = None
        if has_drawn and not self._is_last:
            self._kept = random.getstate(), np.random.get_state()
        self._torchs = generators.seeds_and_states
        self._known: tuple[tuple[int, bytes], ...] = ()
        """(seed, state) of each of torch's generators, unless a checkpoint has put another state there."""
        self._is_at_known: tuple[bool, ...] = ()
        """By generator: True in a block that is computed again and whose checkpoint has put no state there."""

    def compute(self, backward: Callable[[], Any]) -> Any:
        """Run the backward and return its result. Raises ConfigError if it draws other numbers than one worker."""
        if self._kept is not None:
            random.setstate(self._kept[0])
            np.random.set_state(self._kept[1])
        self._known = () if self._is_last else self._torchs()
        others = state_of_others if self._is_last else first_draw
        before = None if self._goes_on else others()
        result = backward()
        self._check_torchs()
        if before is not None and others() != before:
            raise self._refusal(
                "Python or NumPy", "draw them before all blocks, or draw torch's numbers in what is computed again"
            )
        return result

    def again(self, block: Callable[[], Any]) -> Any:
        """Run a block for a checkpoint and return its result.

        `entering` must be called before the block's stream is set.
        """
        try:
            return block()
        finally:
            # A checkpoint may stop the block in the middle.
            if any(self._is_at_known):
                each = zip(self._is_at_known, self._torchs(), self._known, strict=True)
                self._known = tuple(now if is_at_known else known for is_at_known, now, known in each)
                self._is_at_known = ()

    def entering(self) -> None:
        """Check the generators before a block is computed again and sets its stream."""
        if self._known and not any(self._is_at_known):
            pairs = zip(self._torchs(), self._known, strict=True)
            self._is_at_known = tuple(now[0] == known[0] for now, known in pairs)
            self._check_torchs()

    def _check_torchs(self) -> None:
        """Raise ConfigError if one of torch's generators has moved.

        A different seed means that a checkpoint has put a state there.
        """
        for now, known in zip(self._torchs() if self._known else (), self._known, strict=True):
            if now[0] == known[0] and now != known:
                raise self._refusal("torch", "checkpoint whole blocks, or with preserve_rng_state=True")

    def _refusal(self, whose: str, instead: str) -> ConfigError:
        first, last = self._blocks[0], self._blocks[-1]
        where = f"block {first!r}" if first == last else f"blocks {first!r} to {last!r}"
        return ConfigError(
            f"the backward of {where} drew random numbers of {whose}, which in a pipeline are others than in one "
            f"worker, because other micro-batches come in between: {instead}"
        )
