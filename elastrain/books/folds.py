"""Folds of this primary's shards, lane by lane, and the gradients that are finished."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain import protocol as p
from elastrain.books.lending import Buffers
from elastrain.books.ports import Arithmetic, Tensor
from elastrain.fold import Node, overlap


class Folds:
    """Owns the sums of one step; `runs` and `lanes` (their number, per shard) are the logical job's."""

    def __init__(self, runs: int, lanes: Sequence[int], arithmetic: Arithmetic, buffers: Buffers[Tensor]) -> None:
        self._root: Node = (0, runs)
        self._lanes = lanes
        self._arithmetic = arithmetic
        self._buffers = buffers
        self._folds: dict[tuple[int, int], dict[Node, Tensor]] = {}
        """(shard, lane) -> what this primary has."""
        self._finished: dict[tuple[int, int], Tensor] = {}
        """(step, shard) -> gradient over all runs."""

    def keep(self, command: p.Keep, tensor: Tensor) -> None:
        """Let a partial enter the fold."""
        if command.payload is not None and command.node == self._root and self._lanes[command.shard] == 1:
            # The whole gradient as it is, without an addition that would move it here. It is read once more after the
            # commit, and by then its owner may have got the parameters from a new primary and be in its next run.
            incoming, tensor = tensor, self._buffers.take(tensor)
            self._arithmetic.copy(incoming, tensor)
        self._enter((command.shard, command.lane), command.node, tensor)

    def combine(self, command: p.CombineShard) -> None:
        key, c = (command.shard, command.lane), command.combine
        left, right = self._folds[key].pop(c.left), self._folds[key].pop(c.right)
        self._enter(key, c.parent, self._sum(command.shard, left, right))

    def _enter(self, key: tuple[int, int], node: Node, tensor: Tensor) -> None:
        """Take the place of everything that has runs in common with it: a covered partial must not be found again."""
        partials = self._folds.setdefault(key, {})
        for other in [other for other in partials if overlap(other, node)]:
            self._buffers.give_back(partials.pop(other))
        partials[node] = tensor

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
        norms = {shard: self._finish(command.step, shard) for shard in command.shards}
        return p.GradientsFinished(step=command.step, square_norms=norms)

    def _finish(self, step: int, shard: int) -> float:
        """The sum over all runs of each lane, and nothing less, added in block order."""
        total, *more = (self._folds[shard, lane].pop(self._root) for lane in range(self._lanes[shard]))
        for tensor in more:
            total = self._sum(shard, total, tensor)
        self._finished[step, shard] = total
        return self._arithmetic.square_norm(shard, total)

    def finished(self, step: int, shard: int) -> Tensor | None:
        return self._finished.get((step, shard))

    def end_step(self) -> None:
        for tensors in (*self._folds.values(), self._finished):
            for tensor in tensors.values():
                self._buffers.give_back(tensor)
        self._folds.clear()
        self._finished.clear()
