"""Work of a backup: keep finished gradients, make updates later, compare digests, acknowledge to the primary."""

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
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.runs import FinishedGradient, Runs
from elastrain.protocol.messages import Ack, Digests, Gradient


class Backups(MemberPart):
    """Part for the shards that this member backs up. Their states are in `Holdings`."""

    def __init__(
        self, commit: Commit, runs: Runs, holdings: Holdings, primaries: Primaries, mismatch: Mismatches, out: Commands
    ) -> None:
        self._commit, self._runs, self._holdings = commit, runs, holdings
        self._primaries, self._mismatches, self._out = primaries, mismatch, out

    # ------------------------------------------------------------------------------------------------ the open step

    @handles(Gradient)
    def on_gradient(self, source: str, message: Gradient, payload: object) -> None:
        """Store the finished gradients that a primary has sent."""
        if message.step != self._runs.step:
            return
        for index, shard in enumerate(message.shards):
            norm = message.square_norms[index]
            gradient = FinishedGradient(message.contribution, message.touched[index], norm)
            self._holdings.of(shard).keep(message.step, gradient)
        self._out.do(p.StoreGradients(step=message.step, shards=message.shards, source=source, payload=payload))

    def on_kept(self, event: p.GradientsKept) -> bool:
        """Acknowledge stored gradients that are intact. Returns True if they are of the open step."""
        if event.step != self._runs.step:
            return False
        for shard in event.damaged:
            self._holdings.of(shard).void(event.step)
        # If the step has begun anew since, no gradient is kept.
        kept = [shard for shard in event.shards if event.step in self._holdings.of(shard).kept]
        for shard in kept:
            # The acknowledgement may have to wait until the state of the step before is verified.
            self._holdings[shard].owe(event.step, event.source)
        self.acknowledge(kept)
        return True

    def acknowledge(self, shards: Iterable[int]) -> None:
        """Send acknowledgements for those of the shards that may be acknowledged."""
        step = self._runs.step
        by_primary: dict[str, list[int]] = defaultdict(list)
        for shard in shards:
            if (primary := self._holdings[shard].acknowledge(step)) is not None:
                by_primary[primary].append(shard)
        for primary, acked in by_primary.items():
            self._out.send(primary, Ack(step=step, shards=tuple(acked)))

    def kept(self, shards: Iterable[int]) -> dict[int, FinishedGradient]:
        """Return the finished gradients of the open step that this backup has of these shards."""
        found = {shard: self._holdings.find(shard) for shard in shards}
        step = self._runs.step
        return {shard: held.kept[step] for shard, held in found.items() if held is not None and step in held.kept}

    # ------------------------------------------------------------------------------------------- the committed step

    def apply_behind(self, record: Record) -> None:
        """Order the backup's updates of the committed step. The driver makes them when there is time."""
        for shard in self._holdings:
            # This member's own shards were updated at once, as their primary.
            if self._commit.roles.is_mine(shard):
                continue
            held = self._holdings[shard]
            if record.step in held.kept:
                touched = held.kept[record.step].touched
                self._out.do(p.ApplyBehind(record=record, shard=shard, touched=touched))
            else:  # a copy that was not followed up is stale from now on
                self._holdings.drop(shard)

    def take_over(self, record: Record, shards: Iterable[int]) -> None:
        """Make the updates of shards whose primary this member becomes, and compute with their parameters.

        They are compared as those of any backup are, and parameters as if they had been published.
        """
        found = {shard: self._holdings.find(shard) for shard in shards}
        # At once, and not behind: the training loop waits for these parameters.
        # A state that was given up after the vote is missing: another view, which was asked for then, brings it.
        touched = {s: h.kept[record.step].touched for s, h in found.items() if h is not None and record.step in h.kept}
        updates = tuple(p.ApplyBehind(record=record, shard=shard, touched=its) for shard, its in touched.items())
        if updates:
            self._out.do(p.TakeOwnUpdate(updates=updates))
        for shard in touched:
            self._commit.parameters.have(shard)

    @handles(p.AppliedBehind)
    def on_applied_behind(self, event: p.AppliedBehind) -> None:
        """Note the digest of a backup's update, and compare it with the primary's."""
        held = self._holdings.find(event.shard)
        # A change of roles, or a new copy, may have made the update void meanwhile.
        if held is not None and event.shard not in self._holdings.bound and event.step == held.version + 1:
            held.update(event.step, event.digest)
            self._mismatches.answer_askers(event.shard, event.step)
            self.verify(event.shard, event.step)

    def on_digests(self, source: str, message: Digests) -> None:
        """Note a primary's digests, and compare this backup's updates with them."""
        for shard, digest in message.digests:
            held = self._holdings.find(shard)
            if held is not None and shard not in self._holdings.bound and held.version < message.step:
                held.expect(message.step, digest, source)
                self.verify(shard, message.step)

    @handles(p.UpdatedAgain)
    def on_updated_again(self, event: p.UpdatedAgain) -> None:
        """Note an update that was made again because of a doubt."""
        if self._mismatches.on_updated_again(event):
            self.verify(event.shard, event.step)

    def verify(self, shard: int, step: int) -> None:
        """Make the update the backup's state if its digest equals the primary's."""
        held = self._holdings[shard]
        # Update and digest come in either order: the backup may be faster than its primary.
        if not held.is_comparable(step):
            return
        if held.update_of(step) != held.expected_of(step):
            self._mismatches.open(shard, step)
            return
        held.verify(step)
        self._out.do(p.Swap(step=step, shard=shard))
        # This member may have become the primary before its update was verified. Then the state is bound to the model.
        if self._commit.roles.is_mine(shard):
            self._primaries.bind(shard)
        self.acknowledge([shard])
