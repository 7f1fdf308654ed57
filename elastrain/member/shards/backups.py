"""Back shards up: keep finished gradients, update behind, compare digests, and acknowledge to the primary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.job.values import Record
from elastrain.member.contract import MemberPart, handles
from elastrain.member.integrity.mismatches import Mismatches
from elastrain.member.shards.primaries import Primaries
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import HeldShard, Holdings
from elastrain.member.state.runs import FinishedGradient, Runs
from elastrain.protocol.messages import Ack, Digests, Gradient


class Backups(MemberPart):
    """This member as a backup; the states lie in `Holdings`."""

    def __init__(
        self, commit: Commit, runs: Runs, holdings: Holdings, primaries: Primaries, doubts: Mismatches, out: Commands
    ) -> None:
        self._commit, self._runs, self._holdings = commit, runs, holdings
        self._primaries, self._doubts, self._out = primaries, doubts, out

    # ------------------------------------------------------------------------------------------------ the open step

    @handles(Gradient)
    def on_gradient(self, source: str, message: Gradient, payload: object) -> None:
        if message.step != self._runs.step:
            return
        for index, shard in enumerate(message.shards):
            held = self._holdings.of(shard)
            held.kept[message.step] = FinishedGradient(
                message.contribution, message.touched[index], message.square_norms[index]
            )
        self._out.do(p.StoreGradients(step=message.step, shards=message.shards, source=source, payload=payload))

    def on_kept(self, event: p.GradientsKept) -> bool:
        """Answer for what was found intact, and for nothing else; whether it is of the open step."""
        if event.step != self._runs.step:
            return False
        for shard in event.damaged:
            self._holdings.of(shard).kept.pop(event.step, None)
        # The step may have begun anew since: then nothing is kept any more.
        kept = [shard for shard in event.shards if event.step in self._holdings.of(shard).kept]
        for shard in kept:
            # Owed and not sent yet: the state of the step before may still have to be verified.
            self._holdings[shard].owed[event.step] = event.source
        self.acknowledge(kept)
        return True

    def may_acknowledge(self, held: HeldShard, step: int) -> bool:
        """Whether this backup may answer for `step`: only when its state of the step before is verified."""
        # From that state and the gradient it can make the step; from an older one it could not.
        return held.version == step - 1

    def acknowledge(self, shards: Iterable[int]) -> None:
        step = self._runs.step
        by_primary: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            held = self._holdings[shard]
            if step in held.owed and self.may_acknowledge(held, step):
                by_primary[held.owed.pop(step)].append(shard)
        for primary, acked in by_primary.items():
            self._out.send(primary, Ack(step=step, shards=tuple(acked)))

    def kept(self, shards: Iterable[int]) -> dict[int, FinishedGradient]:
        """What this member has of the open step's finished gradients as their backup."""
        found = {shard: self._holdings.find(shard) for shard in shards}
        step = self._runs.step
        return {shard: held.kept[step] for shard, held in found.items() if held is not None and step in held.kept}

    # ------------------------------------------------------------------------------------------- the committed step

    def apply_behind(self, record: Record) -> None:
        """Have the update of the step that has just been committed made when there is time."""
        for shard in self._holdings:
            # Its own shards were updated as their primary, at once.
            if self._commit.roles.is_mine(shard):
                continue
            held = self._holdings[shard]
            if record.step in held.kept:
                touched = held.kept[record.step].touched
                self._out.do(p.ApplyBehind(record=record, shard=shard, touched=touched))
            else:  # a copy that was not followed up is stale from now on
                self._holdings.drop(shard)

    @handles(p.AppliedBehind)
    def on_applied_behind(self, event: p.AppliedBehind) -> None:
        held = self._holdings.find(event.shard)
        # A change of roles, or a copy, may have made the update void while it was being made.
        if held is not None and event.shard not in self._holdings.bound and event.step == held.version + 1:
            held.scratch[event.step] = event.digest
            self._doubts.answer_askers(event.shard, event.step)
            self.verify(event.shard, event.step)

    def on_digests(self, source: str, message: Digests) -> None:
        for shard, digest in message.digests:
            held = self._holdings.find(shard)
            if held is not None and shard not in self._holdings.bound and held.version < message.step:
                held.expected[message.step] = digest
                held.primary = source
                self.verify(shard, message.step)

    @handles(p.UpdatedAgain)
    def on_updated_again(self, event: p.UpdatedAgain) -> None:
        if self._doubts.on_updated_again(event):
            self.verify(event.shard, event.step)

    def verify(self, shard: int, step: int) -> None:
        """Swap the update in if it is the primary's."""
        held = self._holdings[shard]
        # Update and digest come in either order: the backup may be faster than its primary.
        if held.difference is not None or step not in held.scratch or step not in held.expected:
            return
        if held.scratch[step] != held.expected[step]:
            self._doubts.open(shard, step)
            return
        held.verify(step)
        self._out.do(p.Swap(step=step, shard=shard))
        # It became primary before its update was verified; now its state may be the model's.
        if self._commit.roles.is_mine(shard):
            self._primaries.bind(shard)
        self.acknowledge([shard])
