"""Random numbers of a forward that no tensor shows the way of: no member may begin where it would go on with others.

Random numbers that a backward draws: those that one worker draws there, or a sentence that names the blocks.

In one worker a backward follows its forward, and goes on with the streams where that has left them. A member without
the loss computes other micro-batches in between, and does not have what blocks behind its own have drawn.

Random numbers that a member draws in some micro-batches and the tracing pass has not seen: others may draw others.

A block that draws in every third micro-batch only is the usual case. What was seen has forbidden cuts; this was not.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastrain.errors import ConfigError

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


_WORDS = 624
"""Of NumPy's state; the place among them stands behind."""


@dataclass(frozen=True)
class _Left:
    """A block, and the generators where it was left."""

    place: int
    others: object
    torchs: bytes | None = None
    """Where members may differ in torch's numbers from here on, and code drew none of its own in the tracing pass."""


class UntracedDraws:
    """Looks at the generators at the blocks of a pass. Raises ConfigError for a draw that the tracing pass lacks."""

    def __init__(self, blocks: Sequence[str], traced: TracedDraws) -> None:
        self._blocks, self._traced = tuple(blocks), traced
        self._others = state_of_others if traced.inside or traced.between else first_draw
        first = min(traced.inside, default=len(blocks))
        self._alike_up_to = len(blocks) if any(place >= first for place in traced.between) else first
        """Behind this block members may differ in Python's and NumPy's numbers, and code drew none of them."""
        self._may_draw = {*traced.own, len(blocks) - 1}
        self._for_fakes = traced.own - traced.real
        """Behind these blocks code drew for activations only: nothing where these are fakes."""
        self._left: _Left | None = None

    def behind(self) -> None:
        """Code behind the last block has run: another block is about to be entered, or the loss is there."""
        left, self._left = self._left, None
        if left is None:
            return
        if left.torchs not in (None, state_of_torch()):
            raise self._refusal(f"code behind block {self._blocks[left.place]!r} drew random numbers of torch")
        if left.place >= self._alike_up_to and self._others() != left.others:
            raise self._refusal(f"code behind block {self._blocks[left.place]!r} drew numbers of Python or NumPy")

    def passed(self, place: int) -> None:
        """A block that another member computes was entered."""
        is_for_fakes = place in self._for_fakes
        if is_for_fakes or place >= self._alike_up_to:
            self._left = _Left(place, self._others(), state_of_torch() if is_for_fakes else None)

    def computed(self, place: int, compute: Callable[[], Any], *, is_traced: bool = True) -> Any:
        """What the block returns; not `is_traced`: it is that block's neighbour, which the tracing pass left out."""
        torchs, others = state_of_torch(), self._others()
        returned = compute()
        now = state_of_torch()
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
    """Of Python's and NumPy's generators: another value as soon as one of them was drawn from since both were set.

    NumPy takes forty microseconds for a copy of its generator's state, and a forward has many blocks.
    """
    numpys: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]  # of its own list of names
    if not isinstance(numpys, np.random.MT19937):
        return state_of_others()
    state = (ctypes.c_uint32 * (_WORDS + 1)).from_address(numpys.ctypes.state_address)
    # The first word, too: who draws all of them is at the same place again.
    return random.getstate(), state[0], state[_WORDS]


def state_of_torch() -> bytes:
    """Of the generator of the CPU."""
    return torch.default_generator.get_state().numpy().tobytes()


class BackwardDraws:
    """The generators of one micro-batch, from the end of its forward to that of its backward through some blocks.

    A checkpoint draws as its forward has, where it keeps torch's state or begins with a block, which sets its stream.
    Python's and NumPy's numbers go on from the forward where all blocks that draw them are here.
    """

    def __init__(self, blocks: Sequence[str], stretch: range, traced: TracedDraws) -> None:
        """`stretch`: places of the blocks that this member computes."""
        self._blocks = tuple(blocks[place] for place in stretch)
        self._is_last = stretch.stop == len(blocks)
        has_drawn = bool(traced.inside) and all(place in stretch for place in traced.inside)
        self._goes_on = has_drawn or (self._is_last and not traced.inside)
        """Whether Python's and NumPy's generators are where they are in one worker when the forward is over."""
        self._kept: Any = None
        if has_drawn and not self._is_last:
            self._kept = random.getstate(), np.random.get_state()
        self._known: tuple[int, bytes] | None = None
        """Of torch's generator while no checkpoint has put another state there: what it was seeded with, and is at."""
        self._is_at_known = False

    def compute(self, backward: Callable[[], Any]) -> None:
        """Run the backward. Raises ConfigError where it draws numbers that are not those of one worker."""
        if self._kept is not None:
            random.setstate(self._kept[0])
            np.random.set_state(self._kept[1])
        self._known = None if self._is_last else _torchs()
        others = state_of_others if self._is_last else first_draw
        before = None if self._goes_on else others()
        backward()
        self._check_torchs()
        if before is not None and others() != before:
            raise self._refusal(
                "Python or NumPy", "draw them before all blocks, or draw torch's numbers in what is computed again"
            )

    def again(self, block: Callable[[], Any]) -> Any:
        """What a block returns that a checkpoint computes again; `entering` was called before its stream was set."""
        try:
            return block()
        finally:
            # A checkpoint may leave it in the middle.
            if self._is_at_known:
                self._known, self._is_at_known = _torchs(), False

    def entering(self) -> None:
        """A block is about to be computed again, and to have its stream set."""
        if self._known is not None and not self._is_at_known:
            self._is_at_known = torch.default_generator.initial_seed() == self._known[0]
            self._check_torchs()

    def _check_torchs(self) -> None:
        """Another seed is that of a state that a checkpoint has put back, and will take away again."""
        if self._known is not None:
            now = _torchs()
            if now[0] == self._known[0] and now != self._known:
                raise self._refusal("torch", "checkpoint whole blocks, or with preserve_rng_state=True")

    def _refusal(self, whose: str, instead: str) -> ConfigError:
        first, last = self._blocks[0], self._blocks[-1]
        where = f"block {first!r}" if first == last else f"blocks {first!r} to {last!r}"
        return ConfigError(
            f"the backward of {where} drew random numbers of {whose}, which in a pipeline are others than in one "
            f"worker, because other micro-batches come in between: {instead}"
        )


def _torchs() -> tuple[int, bytes]:
    return torch.default_generator.initial_seed(), state_of_torch()
