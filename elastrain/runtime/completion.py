"""When the gradients of a block are final: counts the leaves that fire during the last backward of a run.

Knows indices only, no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NoReturn

from elastrain.errors import ConfigError
from elastrain.layout import Layout

OnBlockDone = Callable[[int, frozenset[int]], None]
"""`(block, leaves of it that got a gradient in this run)`: the block's gradients in the slot are final."""


class Completion:
    """Counts the leaves of each block during one backward and reports a block when all have fired.

    A leaf fires once per backward, after its full accumulation, however often it is used; only a reentrant checkpoint
    fires it once per inner backward. A block's first armed backward therefore only learns whether it does that, and
    the block is reported at the end; later, blocks that do always wait for the end.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._leaves = [frozenset(leaf.index for leaf in layout.leaves_of(b)) for b in range(len(layout.blocks))]
        self._block_of = {leaf: block for block, leaves in enumerate(self._leaves) for leaf in leaves}
        self._learned: set[int] = set()
        self._late: set[int] = set()
        self._report: OnBlockDone | None = None
        self._blocks: Collection[int] = range(len(layout.blocks))
        """Those that this backward goes through."""
        self._fired: set[int] = set()
        self._left: list[int] = []
        self._reported: set[int] = set()

    def arm(self, report: OnBlockDone, blocks: Collection[int] | None = None) -> None:
        """`blocks`: those that the backward goes through, in ascending order; None: all."""
        self._report = report
        self._blocks = range(len(self._leaves)) if blocks is None else blocks
        self._fired.clear()
        self._reported.clear()
        self._left = [len(leaves) for leaves in self._leaves]

    def disarm(self) -> None:
        self._report = None

    def landed(self, leaf: int, touched: set[int]) -> None:
        if self._report is None:
            return
        block = self._block_of[leaf]
        if block not in self._blocks:
            self.refuse(leaf)
        if block in self._reported:
            raise ConfigError(
                f"block {self._layout.blocks[block]!r} got a gradient after its last one: "
                "it is entered several times under a reentrant checkpoint; use checkpoint(…, use_reentrant=False)"
            )
        if leaf in self._fired:
            self._late.add(block)
            return
        self._fired.add(leaf)
        self._left[block] -= 1
        if not self._left[block] and block in self._learned and block not in self._late:
            self._done(block, touched)

    def refuse(self, leaf: int) -> NoReturn:
        """A leaf of a block that this backward does not go through has got a gradient: raises ConfigError."""
        # Nobody would add it up: in another member's gradients of this run it is missing.
        block = self._layout.blocks[self._block_of[leaf]]
        raise ConfigError(
            f"block {block!r} got a gradient on a member that computes other blocks: its parameters are used outside "
            "of its forward; let the block itself use them"
        )

    def finish(self, touched: set[int]) -> None:
        if self._report is None:
            raise RuntimeError("finish() without arm()")
        for block in self._blocks:
            if block not in self._reported:
                self._done(block, touched)
        self._learned.update(self._blocks)
        self._report = None

    def _done(self, block: int, touched: set[int]) -> None:
        assert self._report is not None
        self._reported.add(block)
        self._report(block, self._leaves[block] & touched)
