"""Random numbers that a member draws in some micro-batches and the tracing pass has not seen: others may draw others.

A block that draws in every third micro-batch only is the usual case. What was seen has forbidden cuts; this was not.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.draws import TracedDraws, state_of_others

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
