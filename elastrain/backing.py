"""Backups: keep finished gradients, update behind, compare digests; and copies of shards for holders to come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.attempt import FinishedGradient
from elastrain.codec import BitMask
from elastrain.comparing import Comparing
from elastrain.messages import Ack, Copied, Doubt, Gradient, ShardCopy
from elastrain.standing import HeldShard


class Backing(Comparing):
    """The part of the protocol that keeps every shard in more than one memory."""

    # --------------------------------------------------------------------------------------- backups of the gradient

    def _forward_gradients(self, shards: Iterable[int], only: str | None = None) -> None:
        """Send finished gradients to backups and followers."""
        wanted: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            for member in {*self.now[shard].backups, *self._followers[shard]}:
                if only in (None, member):
                    wanted[member].append(shard)
        for member, their in sorted(wanted.items()):
            done = [self.attempt.finished[shard] for shard in their]
            self._send(
                member,
                Gradient(
                    step=self.attempt.step,
                    shards=tuple(their),
                    contribution=done[0].contribution,
                    touched=tuple(tuple(map(BitMask, f.touched)) for f in done),
                    square_norms=tuple(f.square_norm for f in done),
                ),
            )

    def _on_gradient(self, source: str, message: Gradient, payload: object) -> None:
        if message.step != self.attempt.step:
            return
        for index, shard in enumerate(message.shards):
            held = self._held(shard)
            held.kept[message.step] = FinishedGradient(
                message.contribution, message.touched[index], message.square_norms[index]
            )
            self._do(p.StoreGradient(step=message.step, shard=shard, payload=payload, index=index))
            held.owed[message.step] = source
        self._acknowledge(message.shards)

    def _may_acknowledge(self, held: HeldShard, step: int) -> bool:
        """A backup answers for `step` only when its state of the step before is verified."""
        return held.version == step - 1

    def _acknowledge(self, shards: Iterable[int]) -> None:
        step = self.attempt.step
        by_primary: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            held = self.held[shard]
            if step in held.owed and self._may_acknowledge(held, step):
                by_primary[held.owed.pop(step)].append(shard)
        for primary, acked in by_primary.items():
            self._send(primary, Ack(step=step, shards=tuple(acked)))

    # ------------------------------------------------------------------------------------------- backups behind

    def _held(self, shard: int) -> HeldShard:
        return self.held.setdefault(shard, HeldShard())

    def _drop_given_away(self) -> None:
        for shard in sorted(self._dropping):
            if shard not in self.held or self.held[shard].difference is None:
                self._drop(shard)

    def _drop(self, shard: int) -> None:
        if shard in self.held and self.held[shard].difference is not None:
            self._end_in_doubt(shard)
            return
        self._dropping.discard(shard)
        self.bound.discard(shard)
        if self.held.pop(shard, None) is not None:
            self._do(p.Drop(shard=shard))

    def _on_applied_behind(self, event: p.AppliedBehind) -> None:
        held = self.held.get(event.shard)
        if held is not None and event.shard not in self.bound and event.step == held.version + 1:
            held.scratch[event.step] = event.digest
            self._answer_askers(event.shard, event.step)
            self._verify(event.shard, event.step)

    def _verify(self, shard: int, step: int) -> None:
        held = self.held[shard]
        if held.difference is not None or step not in held.scratch or step not in held.expected:
            return
        if held.scratch[step] != held.expected[step]:
            self._doubt(shard, step)
            return
        held.digest = held.scratch.pop(step)
        del held.expected[step]
        held.version, held.is_copy = step, False
        held.kept.pop(step, None)
        self._do(p.Swap(step=step, shard=shard))
        if self.now[shard].primary == self.me:
            self._bind(shard)
        self._acknowledge([shard])

    def _bind(self, shard: int) -> None:
        self.bound.add(shard)
        self._replace_parameters(shard, p.Bind(step=self.held[shard].version, shard=shard))
        self._have_parameters(shard)

    # ----------------------------------------------------------------------------------------------------- rebalancing

    def _plan_copies(self) -> None:
        """What is still to be copied towards the target, shard by shard."""
        self._copies = [
            (shard, member)
            for shard in self._mine()
            for member in self.goal[shard].all
            if member not in {*self.now[shard].all, *self._followers[shard]}
        ]

    def _rebalance(self) -> None:
        """Copy shards towards the target, a bounded number of bytes per step: the vote waits for what is on its way."""
        if not self._copies or not self._may_copy():
            return
        later: list[tuple[int, str]] = []
        for shard, member in self._copies:
            spent = self._copied_bytes >= self.copy_budget_bytes
            if spent or self.held[shard].version != self.committed:
                later.append((shard, member))
                continue
            self._copied_bytes += self.shape.sizes[shard]
            self._copying[shard, member] = self.committed
            self._send_copy(shard, member)
        self._copies = later

    def _send_copy(self, shard: int, member: str) -> None:
        """With the digest that is known to be right, so that what has changed here since does not spread."""
        self._send(member, ShardCopy(step=self.committed, shard=shard, digest=self.held[shard].digest))

    def _may_copy(self) -> bool:
        """A copy is read before the state moves on, so a vote waits for it: copies are made while runs are computed.

        Where digests take longer than the runs, the first copies of a step are made afterwards.
        """
        attempt = self.attempt
        computing = bool(attempt.pending or not attempt.targets) or not self._has_copied()
        here = self.begun == attempt.step and not self.recovering
        return here and computing and not self._digesting and not attempt.voted

    def _has_copied(self) -> bool:
        """In each step something comes nearer to the target: else a job might go on for ever without its backups."""
        return not self._copies or self._copied_bytes > 0

    def _on_took_copy(self, event: p.TookCopy) -> None:
        if self.recovering or event.step != self.committed:
            return
        if not event.intact:
            self._on_broken_copy(event)
            return
        self._broken.pop(event.shard, None)
        held = self._held(event.shard)
        held.version, held.is_copy = event.step, True
        held.digest = event.told
        held.kept.clear()
        held.scratch.clear()
        held.expected.clear()
        self._send(event.source, Copied(step=event.step, shard=event.shard, intact=True))

    def _on_broken_copy(self, event: p.TookCopy) -> None:
        """Once more; then its sender has to say whether it still has what it told."""
        times = self._broken.get(event.shard, ("", 0, 0))[2] + 1
        self._broken[event.shard] = (event.source, event.told, times)
        if times == 1:
            self._do(p.Noticed(reason=f"the copy of shard {event.shard} from {event.source} is damaged: once more"))
            self._send(event.source, Copied(step=event.step, shard=event.shard, intact=False))
        else:
            self._send(event.source, Doubt(step=event.step, shard=event.shard, parameters=False))

    def _on_copied(self, source: str, message: Copied) -> None:
        if (message.shard, source) not in self._copying:
            return
        if not message.intact:
            self._send_copy(message.shard, source)
            return
        del self._copying[message.shard, source]
        self._followers[message.shard].add(source)
        if message.shard in self.attempt.finished:
            self._forward_gradients([message.shard], only=source)
