"""Backups: keep finished gradients, update behind, compare digests; and copies of shards for holders to come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.attempt import Finished
from elastrain.messages import Ack, Copied, Copy, Digests, Gradient
from elastrain.placement import Holders
from elastrain.reduction import Reduction
from elastrain.standing import Held


class Backing(Reduction):
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
                    touched=tuple(f.touched for f in done),
                    square_norms=tuple(f.square_norm for f in done),
                ),
            )

    def _on_gradient(self, source: str, message: Gradient, payload: object) -> None:
        if message.step != self.attempt.step:
            return
        for index, shard in enumerate(message.shards):
            held = self._held(shard)
            held.kept[message.step] = Finished(
                message.contribution, message.touched[index], message.square_norms[index]
            )
            self._do(p.StoreGradient(step=message.step, shard=shard, payload=payload, index=index))
            held.owed[message.step] = source
        self._acknowledge(message.shards)

    def _may_acknowledge(self, held: Held, step: int) -> bool:
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

    def _held(self, shard: int) -> Held:
        return self.held.setdefault(shard, Held())

    def _compute_digests(self, shards: Iterable[int], before: tuple[Holders, ...]) -> None:
        wanted = tuple(s for s in shards if self._compares_with(s, before))
        if wanted:
            self._digesting = True
            self._do(p.ComputeDigests(step=self.committed, shards=wanted))
        else:
            self._drop_given_away()

    def _compares_with(self, shard: int, before: tuple[Holders, ...]) -> set[str]:
        """Who compares its copy of this shard with ours."""
        members = {*before[shard].all, *self.now[shard].all, *self._followers[shard]}
        return members & set(self._others)

    def _on_digested(self, event: p.Digested) -> None:
        self._digesting = False
        if event.step != self.committed or self.recovering:
            return
        digests = tuple(sorted(event.digests.items()))
        for member in self._others:
            self._send(member, Digests(step=event.step, digests=digests))
        self._drop_given_away()

    def _drop_given_away(self) -> None:
        for shard in sorted(self._dropping):
            self._drop(shard)

    def _drop(self, shard: int) -> None:
        self._dropping.discard(shard)
        self.bound.discard(shard)
        if self.held.pop(shard, None) is not None:
            self._do(p.Drop(shard=shard))

    def _on_digests(self, message: Digests) -> None:
        for shard, digest in message.digests:
            held = self.held.get(shard)
            if held is not None and shard not in self.bound and held.version < message.step:
                held.expected[message.step] = digest
                self._verify(shard, message.step)

    def _on_applied_behind(self, event: p.AppliedBehind) -> None:
        held = self.held.get(event.shard)
        if held is not None and event.shard not in self.bound and event.step == held.version + 1:
            held.scratch[event.step] = event.digest
            self._verify(event.shard, event.step)

    def _verify(self, shard: int, step: int) -> None:
        held = self.held[shard]
        if step not in held.scratch or step not in held.expected:
            return
        if held.scratch.pop(step) != held.expected.pop(step):
            primary = self.now[shard].primary
            self._fail(
                "DivergedError",
                f"the state of shard {shard} after step {step} differs between its primary {primary} and its backup "
                f"{self.me}: one of the two devices computes wrongly; start again without them",
            )
            return
        held.version = step
        held.kept.pop(step, None)
        self._do(p.Swap(step=step, shard=shard))
        if self.now[shard].primary == self.me:
            self._bind(shard)
        self._acknowledge([shard])

    def _bind(self, shard: int) -> None:
        self.bound.add(shard)
        self._have_parameters(shard)
        self._do(p.Bind(step=self.held[shard].version, shard=shard))

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
            self._send(member, Copy(step=self.committed, shard=shard))
        self._copies = later

    def _may_copy(self) -> bool:
        """A copy is read before the state moves on, so a vote waits for it: copies are made while runs are computed."""
        attempt = self.attempt
        computing = self.begun == attempt.step and bool(attempt.pending or not attempt.targets)
        return computing and not self.recovering and not self._digesting and not attempt.voted

    def _on_took_copy(self, event: p.TookCopy) -> None:
        if self.recovering or event.step != self.committed:
            return
        held = self._held(event.shard)
        held.version = event.step
        held.kept.clear()
        held.scratch.clear()
        held.expected.clear()
        self._send(event.source, Copied(step=event.step, shard=event.shard, intact=event.intact))

    def _on_copied(self, source: str, message: Copied) -> None:
        if self._copying.pop((message.shard, source), None) is None:
            return
        if not message.intact:
            self._fail("DivergedError", f"the copy of shard {message.shard} arrived at {source} with other content")
            return
        self._followers[message.shard].add(source)
        if message.shard in self.attempt.finished:
            self._forward_gradients([message.shard], only=source)
