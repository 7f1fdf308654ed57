"""Reduction of gradients: from a block's gradient over one run to a shard's finished gradient at its primary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from elastrain import protocol as p
from elastrain.job.fold import Fold, Node, is_covered, leaves
from elastrain.job.values import Recovery, Shape
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Roles
from elastrain.member.state.member_views import Views
from elastrain.member.state.runs import FinishedGradient, PartialSet, Runs, Weight
from elastrain.protocol.codec import BitMask
from elastrain.protocol.messages import Gradient, Partial

Lanes = Iterable[tuple[int, int]]
"""(shard, lane) of each tensor."""


class Reduction(MemberPart):
    """Part that owns the folds of this primary's shards, and their finished gradients."""

    def __init__(self, me: str, shape: Shape, views: Views, roles: Roles, runs: Runs, out: Commands) -> None:
        self._me = me
        self._shards = shape.shards
        self._fold = Fold(shape.runs)
        self._views = views
        self._roles = roles
        self._runs = runs
        self._out = out
        self.finished: dict[int, FinishedGradient] = {}
        """Shard -> its gradient of the open step, summed over all runs."""
        self._folds: dict[tuple[int, int], PartialSet] = {}
        """(shard, lane) -> partial sums that this primary has."""
        self._whole: list[int] = []
        """Shards whose folds are complete, but whose gradient norm is not computed yet."""
        self._deferred: list[p.BlockDone] = []
        """Gradients that the training loop computed during a recovery."""
        self._broken: set[int] = set()
        """Shards with a damaged sum. They are not finished in this attempt."""

    def begin(self, step: int) -> None:
        """Start anew with the next step."""
        self.finished = {}
        self._folds = {}
        self._whole, self._deferred = [], []
        self._broken.clear()

    # -------------------------------------------------------------------------------------------------- own partials

    @handles(p.BlockDone)
    def on_block_done(self, event: p.BlockDone) -> None:
        """Add a block's gradient over one run to this member's partials, and send complete partials."""
        # The loop may still compute a run of a step that was committed without it.
        if event.step != self._runs.step or self._runs.is_void:
            return
        if self._views.is_recovering:
            # The recovery decides from the reports. A gradient that came later must wait for the decision.
            self._deferred.append(event)
            return
        for combine in self._runs.add(event.block, event.run, (event.contribution, event.touched)):
            self._out.do(p.CombineOwn(step=event.step, block=event.block, combine=combine))
        self._deliver_unsent()

    def _deliver_unsent(self) -> None:
        for block, node in list(self._runs.take_unsent()):
            self._deliver(block, node, self._lanes_of(block))

    def _deliver(self, block: int, node: Node, lanes: Lanes) -> None:
        """Send a partial to the primaries of these shards."""
        contribution, touched = weight = self._runs.own[block].weight(node)
        by_primary: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for shard, lane in lanes:
            by_primary[self._roles.live[shard].primary].append((shard, lane))
        # One message per primary: a block has many shards, and a frame costs more than the name of a shard.
        for primary, wanted in by_primary.items():
            if primary == self._me:
                self.fold_in(self._me, block, node, weight, wanted)
                continue
            message = Partial(
                step=self._runs.step,
                block=block,
                node=node,
                contribution=contribution,
                touched=BitMask(touched),
                lanes=tuple(wanted),
            )
            self._out.send(primary, message)

    def _lanes_of(self, block: int) -> Lanes:
        for shard, shape in enumerate(self._shards):
            for lane, lane_block in enumerate(shape.lanes):
                if lane_block == block:
                    yield shard, lane

    # --------------------------------------------------------------------------------------------------------- folds

    @handles(Partial)
    def on_partial(self, source: str, message: Partial, payload: object) -> None:
        """Add a partial that another member has sent to the folds of this primary's shards."""
        if message.step == self._runs.step:
            weight = (message.contribution, message.touched)
            self.fold_in(source, message.block, message.node, weight, message.lanes, payload)

    def why_unfinished(self, shard: int) -> str:
        """Return a text that says how much is missing in the gradient of this primary's shard."""
        folds = (self._folds.get((shard, lane)) for lane in range(len(self._shards[shard].lanes)))
        here = [leaves(fold.nodes) if fold is not None else frozenset[int]() for fold in folds]
        missing = [run for run in range(self._fold.runs) if not all(run in runs for runs in here)]
        lacks = f"lacks {len(missing)} of {self._fold.runs} runs, such as {missing[0]}" if missing else "is not summed"
        return f"the gradient of shard {shard} {lacks}"

    def fold_in(self, maker: str, block: int, node: Node, weight: Weight, lanes: Lanes, payload: object = None) -> None:
        """Add a block's partial to the folds of these lanes, and note the shards that become complete."""
        for index, (shard, lane) in enumerate(lanes):
            if shard in self.finished:
                continue  # sent for other shards' sake; its owner does not wait for this reader
            partials = self._folds.setdefault((shard, lane), PartialSet(self._fold))
            combines = partials.add(node, weight)
            if combines is None:
                continue
            step = self._runs.step
            self._out.do(
                p.Keep(
                    step=step, shard=shard, lane=lane, node=node, block=block, maker=maker, payload=payload, index=index
                )
            )
            for combine in combines:
                self._out.do(p.CombineShard(step=step, shard=shard, lane=lane, combine=combine))
            if partials.complete and self._is_folded(shard):
                self._whole.append(shard)

    def _is_folded(self, shard: int) -> bool:
        folds = [self._folds.get((shard, lane)) for lane in range(len(self._shards[shard].lanes))]
        return all(fold is not None and fold.complete for fold in folds)

    def progress(self) -> bool:
        """Order the norms of all complete gradients in one call. Returns True if there were any."""
        whole, self._whole = self._whole, []
        if whole:
            self._out.do(p.FinishGradients(step=self._runs.step, shards=tuple(whole)))
        return bool(whole)

    def on_finished(self, event: p.GradientsFinished) -> None:
        """Note finished gradients, and send them to the backups."""
        if event.step != self._runs.step:
            return
        self._broken.update(event.damaged)
        finished = {shard: norm for shard, norm in event.square_norms.items() if shard not in self._broken}
        for shard, square_norm in finished.items():
            lanes = range(len(self._shards[shard].lanes))
            weights = [self._folds[shard, lane].weight(self._fold.root) for lane in lanes]
            # All lanes were folded over the same runs, so the first lane's contribution holds for all.
            self.finished[shard] = FinishedGradient(weights[0][0], tuple(w[1] for w in weights), square_norm)
        # A recovery decides the backups; `resume` sends the gradients then.
        if not self._views.is_recovering:
            self.forward(finished)

    def on_damaged(self, event: p.PartialDamaged) -> None:
        """Mark the shard as damaged: its sum does not count in this attempt."""
        self._broken.add(event.shard)

    def forward(self, shards: Iterable[int], only: str | None = None) -> None:
        """Send finished gradients to backups and followers, or to one of them."""
        wanted: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            for member in self._roles.readers(shard):
                if only in (None, member):
                    wanted[member].append(shard)
        for member, their in sorted(wanted.items()):
            done = [self.finished[shard] for shard in their]
            message = Gradient(
                step=self._runs.step,
                shards=tuple(their),
                contribution=done[0].contribution,
                touched=tuple(tuple(map(BitMask, f.touched)) for f in done),
                square_norms=tuple(f.square_norm for f in done),
            )
            self._out.send(member, message)

    # ------------------------------------------------------------------------------------------------ changes of view

    def folded(self) -> tuple[tuple[int, int, tuple[Node, ...]], ...]:
        """Return (shard, lane, partials that are here) for this member's report."""
        return tuple((s, lane, tuple(sorted(f.nodes))) for (s, lane), f in sorted(self._folds.items()))

    def take_over(self, kept: Mapping[int, FinishedGradient]) -> None:
        """Keep folds of this primary's present shards only. `kept`: gradients that it has as their backup until now."""
        # A new primary of the other shards folds them again, from partials that their makers still have.
        mine = set(self._roles.mine)
        self._folds = {key: fold for key, fold in self._folds.items() if key[0] in mine}
        self.finished = {**kept, **self.finished}

    def resume(self, recovery: Recovery) -> None:
        """Send the partials that primaries lack, and add what was computed during the recovery."""
        folded = recovery.folded
        for block, node in sorted(self._runs.sent):
            lanes = [key for key in self._lanes_of(block) if not is_covered(node, folded[key])]
            self._deliver(block, node, lanes)
        self.forward([s for s in sorted(self._roles.mine) if s in self.finished])
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self.on_block_done(event)
        self._deliver_unsent()
