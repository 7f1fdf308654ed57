"""Random numbers that a backward draws: those that one worker draws there, or a sentence that names the blocks.

In one worker a backward follows its forward, and goes on with the streams where that has left them. A member without
the loss computes other micro-batches in between, and does not have what blocks behind its own have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.draws import TracedDraws, state_of_others
from elastrain.pipeline.stubs.untraced import first_draw, state_of_torch


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
