"""Folds of this primary's shards, lane by lane, and finished gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic, Tensor
from elastrain.buffers.slots import Buffers
from elastrain.job.fold import Node, overlap


@dataclass(frozen=True, eq=False)
class Sum:
    """The sum of one node of a fold."""

    tensor: Tensor
    checksum: int | None
    """None if it needs none, because it is read in the turn in which it was made."""
    maker: str = ""
    """The member that computed it; empty if it was added up here."""
    is_broken: bool = False
    """True if a part of it was not what its maker had. The sum then does not count."""


class Folds:
    """Owner of the sums of one step. `runs` and `lanes` (their number, per shard) are those of the job."""

    def __init__(self, runs: int, lanes: Sequence[int], arithmetic: Arithmetic, buffers: Buffers[Tensor]) -> None:
        self._root: Node = (0, runs)
        self._lanes = lanes
        self._arithmetic = arithmetic
        self._buffers = buffers
        self._folds: dict[tuple[int, int], dict[Node, Sum]] = {}
        """(shard, lane) -> partials that this primary has."""
        self._finished: dict[tuple[int, int], Sum] = {}
        """(step, shard) -> gradient over all runs."""

    def keep(self, command: p.Keep, tensor: Tensor, checksum: int | None) -> p.Event | None:
        """Enter a partial into the fold. `checksum` is its maker's. Returns PartialDamaged if its copy differs."""
        key, is_broken = (command.shard, command.lane), False
        is_whole = command.payload is not None and self.is_whole(command.shard, command.node)
        if is_whole or self._arithmetic.is_far(tensor):
            # A whole gradient needs no addition that would copy it here. It is read once more after the commit. By then
            # its owner may have got parameters from a new primary and be in its next run. So it is copied now.
            incoming, tensor = tensor, self._buffers.take(tensor)
            self._arithmetic.copy(incoming, tensor)
            is_broken = is_whole and not self._is_intact(tensor, checksum)
        self._enter(key, command.node, Sum(tensor, checksum, command.maker, is_broken))
        return self._damaged(command.step, key, command.node, command.maker) if is_broken else None

    def is_whole(self, shard: int, node: Node) -> bool:
        """Return True if this is the shard's gradient over all runs and all blocks that have a part in it."""
        return node == self._root and self._lanes[shard] == 1

    def combine(self, command: p.CombineShard) -> p.Event | None:
        """Add two sums. Returns PartialDamaged for the first one that is not what its maker had."""
        key, c = (command.shard, command.lane), command.combine
        left, right = self._folds[key].pop(c.left), self._folds[key].pop(c.right)
        # Checksum and addition read it together, while it is in the caches, so that no change in between is missed.
        wrong = next(((node, its) for node, its in ((c.left, left), (c.right, right)) if not self._may_add(its)), None)
        total = self._sum(command.shard, left.tensor, right.tensor)
        checksum = None if self.is_whole(command.shard, c.parent) else self._arithmetic.checksum(total)
        # Entered even if damaged, because later work of this turn expects the sum. None of it will count.
        is_broken = wrong is not None or left.is_broken or right.is_broken
        self._enter(key, c.parent, Sum(total, checksum, is_broken=is_broken))
        return None if wrong is None else self._damaged(command.step, key, wrong[0], wrong[1].maker)

    def _may_add(self, its: Sum) -> bool:
        # The maker of a broken sum was named already. Reporting the sums above would blame members that only added.
        return its.is_broken or self._is_intact(its.tensor, its.checksum)

    def _is_intact(self, tensor: Tensor, checksum: int | None) -> bool:
        return checksum is None or self._arithmetic.checksum(tensor) == checksum

    def _damaged(self, step: int, key: tuple[int, int], node: Node, maker: str) -> p.Event:
        return p.PartialDamaged(step=step, shard=key[0], lane=key[1], node=node, maker=maker)

    def _enter(self, key: tuple[int, int], node: Node, its: Sum) -> None:
        """Put it in place of all partials that share runs with it, so that a covered partial is not used again."""
        partials = self._folds.setdefault(key, {})
        for other in [other for other in partials if overlap(other, node)]:
            self._buffers.give_back(partials.pop(other).tensor)
        partials[node] = its

    def _sum(self, shard: int, left: Tensor, right: Tensor) -> Tensor:
        """Return `left + right` in a buffer of this primary. A member's partial is never written to."""
        # Several primaries may read a partial in shared memory, and it is sent again if a primary is lost.
        if self._buffers.owns(left):
            out = left
        else:
            out = right if self._buffers.owns(right) else self._buffers.take(left)
        self._arithmetic.add(shard, left, right, out)
        if out is not right:
            self._buffers.give_back(right)
        return out

    def finish(self, command: p.FinishGradients) -> p.GradientsFinished:
        """Add the lanes of these shards, and measure them."""
        damaged = tuple(shard for shard in command.shards if not self._finish(command.step, shard))
        totals = {shard: self._finished[command.step, shard].tensor for shard in command.shards}
        norms = {shard: self._arithmetic.square_norm(shard, total) for shard, total in totals.items()}
        return p.GradientsFinished(step=command.step, square_norms=norms, damaged=damaged)

    def _finish(self, step: int, shard: int) -> bool:
        """Add the complete sums of all lanes in block order. Returns True if all were intact."""
        lanes = [self._folds[shard, lane].pop(self._root) for lane in range(self._lanes[shard])]
        # With several lanes, the first ones waited for the others, and may have changed meanwhile.
        is_intact = len(lanes) == 1 or all(self._may_add(its) for its in lanes)
        total, *more = (its.tensor for its in lanes)
        for tensor in more:
            total = self._sum(shard, total, tensor)
        self._finished[step, shard] = Sum(total, None)
        return is_intact

    def finished(self, step: int, shard: int) -> Tensor | None:
        """Return the shard's finished gradient, or None."""
        found = self._finished.get((step, shard))
        return None if found is None else found.tensor

    def checksum(self, step: int, shard: int) -> int:
        """Return the checksum of a finished gradient, as of the first sending, just after it was finished."""
        found = self._finished[step, shard]
        if found.checksum is None:
            found = self._finished[step, shard] = replace(found, checksum=self._arithmetic.checksum(found.tensor))
        assert found.checksum is not None
        return found.checksum

    def end_step(self) -> None:
        """Free all sums and finished gradients."""
        # Some tensors are members' own partials, which `give_back` ignores.
        for sums in (*self._folds.values(), self._finished):
            for its in sums.values():
                self._buffers.give_back(its.tensor)
        self._folds.clear()
        self._finished.clear()
