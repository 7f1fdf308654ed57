"""Folds of this primary's shards, lane by lane, and the gradients that are finished."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastrain import protocol as p
from elastrain.buffers.port import Arithmetic, Tensor
from elastrain.buffers.slots import Buffers
from elastrain.job.fold import Node, overlap


@dataclass(frozen=True, eq=False)
class Sum:
    """What is there of one node of a fold."""

    tensor: Tensor
    checksum: int | None
    """None: it is read in the turn in which it was made."""
    maker: str = ""
    """The member that has computed it; empty: it was added up here."""
    is_broken: bool = False
    """Something in it was not what its maker had: it counts for nothing."""


class Folds:
    """Owns the sums of one step; `runs` and `lanes` (their number, per shard) are the logical job's."""

    def __init__(self, runs: int, lanes: Sequence[int], arithmetic: Arithmetic, buffers: Buffers[Tensor]) -> None:
        self._root: Node = (0, runs)
        self._lanes = lanes
        self._arithmetic = arithmetic
        self._buffers = buffers
        self._folds: dict[tuple[int, int], dict[Node, Sum]] = {}
        """(shard, lane) -> what this primary has."""
        self._finished: dict[tuple[int, int], Sum] = {}
        """(step, shard) -> gradient over all runs."""

    def keep(self, command: p.Keep, tensor: Tensor, checksum: int | None) -> p.Event | None:
        """Let a partial enter the fold; `checksum` is its maker's."""
        key, is_broken = (command.shard, command.lane), False
        if command.payload is not None and self.is_whole(command.shard, command.node):
            # The whole gradient as it is, without an addition that would move it here. It is read once more after the
            # commit, and by then its owner may have got the parameters from a new primary and be in its next run.
            incoming, tensor = tensor, self._buffers.take(tensor)
            self._arithmetic.copy(incoming, tensor)
            is_broken = not self._is_intact(tensor, checksum)
        self._enter(key, command.node, Sum(tensor, checksum, command.maker, is_broken))
        return self._damaged(command.step, key, command.node, command.maker) if is_broken else None

    def is_whole(self, shard: int, node: Node) -> bool:
        """Whether that is the shard's gradient over all runs, and of all blocks that have a part in it."""
        return node == self._root and self._lanes[shard] == 1

    def combine(self, command: p.CombineShard) -> p.Event | None:
        """Add two sums that are still what their makers had; the answer names the first that is not."""
        key, c = (command.shard, command.lane), command.combine
        left, right = self._folds[key].pop(c.left), self._folds[key].pop(c.right)
        # Read for the checksum and for the addition at once, while it is in the caches: nothing changes in between.
        wrong = next(((node, its) for node, its in ((c.left, left), (c.right, right)) if not self._may_add(its)), None)
        total = self._sum(command.shard, left.tensor, right.tensor)
        checksum = None if self.is_whole(command.shard, c.parent) else self._arithmetic.checksum(total)
        # Entered all the same: what follows in this turn takes the sum for given, and none of it will count.
        is_broken = wrong is not None or left.is_broken or right.is_broken
        self._enter(key, c.parent, Sum(total, checksum, is_broken=is_broken))
        return None if wrong is None else self._damaged(command.step, key, wrong[0], wrong[1].maker)

    def _may_add(self, its: Sum) -> bool:
        # Whoever broke it has been named: to name it again in the sums above would blame who only added.
        return its.is_broken or self._is_intact(its.tensor, its.checksum)

    def _is_intact(self, tensor: Tensor, checksum: int | None) -> bool:
        return checksum is None or self._arithmetic.checksum(tensor) == checksum

    def _damaged(self, step: int, key: tuple[int, int], node: Node, maker: str) -> p.Event:
        return p.PartialDamaged(step=step, shard=key[0], lane=key[1], node=node, maker=maker)

    def _enter(self, key: tuple[int, int], node: Node, its: Sum) -> None:
        """Take the place of everything that has runs in common with it: a covered partial must not be found again."""
        partials = self._folds.setdefault(key, {})
        for other in [other for other in partials if overlap(other, node)]:
            self._buffers.give_back(partials.pop(other).tensor)
        partials[node] = its

    def _sum(self, shard: int, left: Tensor, right: Tensor) -> Tensor:
        """`left + right` in a buffer of ours; what belongs to a member's partial is never written."""
        # A partial may be read by several primaries, in shared memory, and is sent again if a primary is lost.
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
        """The sum over all runs of each lane, and nothing less, added in block order; whether all were intact."""
        lanes = [self._folds[shard, lane].pop(self._root) for lane in range(self._lanes[shard])]
        # Where there are several, they have waited for one another.
        is_intact = len(lanes) == 1 or all(self._may_add(its) for its in lanes)
        total, *more = (its.tensor for its in lanes)
        for tensor in more:
            total = self._sum(shard, total, tensor)
        self._finished[step, shard] = Sum(total, None)
        return is_intact

    def finished(self, step: int, shard: int) -> Tensor | None:
        found = self._finished.get((step, shard))
        return None if found is None else found.tensor

    def checksum(self, step: int, shard: int) -> int:
        """Of a finished gradient, as it was when it was first sent: that is when it was finished."""
        found = self._finished[step, shard]
        if found.checksum is None:
            found = self._finished[step, shard] = replace(found, checksum=self._arithmetic.checksum(found.tensor))
        assert found.checksum is not None
        return found.checksum

    def end_step(self) -> None:
        # Members' own partials are among them: `give_back` leaves alone what was not taken from there.
        for sums in (*self._folds.values(), self._finished):
            for its in sums.values():
                self._buffers.give_back(its.tensor)
        self._folds.clear()
        self._finished.clear()
