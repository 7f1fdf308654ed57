"""Compute and fold: from a finished run to the finished gradient of a shard, at its primary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.attempt import FinishedGradient, Weight
from elastrain.codec import BitMask
from elastrain.fold import Node, is_covered
from elastrain.messages import Partial
from elastrain.standing import Standing


class Reduction(Standing):
    """The part of the protocol that sums."""

    def _forward_gradients(self, shards: Iterable[int], only: str | None = None) -> None:
        """Send finished gradients to backups and followers."""
        raise NotImplementedError

    def _on_run_done(self, event: p.BlockDone) -> None:
        if event.step != self.attempt.step:
            return
        if self.recovering:
            self._deferred.append(event)
            return
        own = self.attempt.own[event.block]
        goal = self.attempt.target_of(event.run)
        weight = (event.contribution, event.touched)
        for step in own.add((event.run, event.run + 1), weight, within=goal) or ():
            self._do(p.CombineOwn(step=event.step, block=event.block, combine=step))
        self._deliver_unsent()

    def _deliver_unsent(self) -> None:
        for block, node in list(self.attempt.unsent()):
            self.attempt.sent.add((block, node))
            self._deliver(block, node)

    def _deliver(self, block: int, node: Node, covered: dict[tuple[int, int], frozenset[Node]] | None = None) -> None:
        """Send a partial to the primaries of the block's shards, less those that have it already."""
        weight = self.attempt.own[block].weight(node)
        lanes: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for shard, lane in self._lanes_of(block):
            if covered is None or not is_covered(node, covered[shard, lane]):
                lanes[self.now[shard].primary].append((shard, lane))
        for primary, wanted in lanes.items():
            if primary == self.me:
                self._fold_in(block, node, weight, wanted, None)
                continue
            self._send(
                primary,
                Partial(
                    step=self.attempt.step,
                    block=block,
                    node=node,
                    contribution=weight[0],
                    touched=BitMask(weight[1]),
                    lanes=tuple(wanted),
                ),
            )

    def _lanes_of(self, block: int) -> Iterable[tuple[int, int]]:
        for shard, shape in enumerate(self.shape.shards):
            for lane, lane_block in enumerate(shape.lanes):
                if lane_block == block:
                    yield shard, lane

    def _on_partial(self, message: Partial, payload: object) -> None:
        if message.step == self.attempt.step:
            weight = (message.contribution, message.touched)
            self._fold_in(message.block, message.node, weight, message.lanes, payload)

    def _fold_in(
        self, block: int, node: Node, weight: Weight, lanes: Iterable[tuple[int, int]], payload: object
    ) -> None:
        for index, (shard, lane) in enumerate(lanes):
            if shard in self.attempt.finished:
                continue  # sent for other shards' sake; its owner does not wait for this reader
            partials = self.attempt.fold_of(shard, lane)
            steps = partials.add(node, weight)
            if steps is None:
                continue
            self._do(
                p.Keep(
                    step=self.attempt.step, shard=shard, lane=lane, node=node, payload=payload, index=index, block=block
                )
            )
            for step in steps:
                self._do(p.CombineShard(step=self.attempt.step, shard=shard, lane=lane, combine=step))
            if partials.complete and self._is_folded(shard):
                self._whole.append(shard)

    def _finish_folds(self) -> None:
        whole, self._whole = self._whole, []
        if whole:
            self._do(p.FinishGradients(step=self.attempt.step, shards=tuple(whole)))

    def _is_folded(self, shard: int) -> bool:
        lanes = range(len(self.shape.shards[shard].lanes))
        return all((shard, n) in self.attempt.folds and self.attempt.folds[shard, n].complete for n in lanes)

    def _on_finished(self, event: p.GradientsFinished) -> None:
        if event.step != self.attempt.step:
            return
        root = self.attempt.fold.root
        for shard, square_norm in event.square_norms.items():
            lanes = range(len(self.shape.shards[shard].lanes))
            weights = [self.attempt.folds[shard, lane].weight(root) for lane in lanes]
            self.attempt.finished[shard] = FinishedGradient(
                contribution=weights[0][0], touched=tuple(w[1] for w in weights), square_norm=square_norm
            )
        if not self.recovering:
            self._forward_gradients(event.square_norms)
