"""Rules for events and messages that concern several of the parts that keep shards."""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles
from elastrain.member.parts import Machine
from elastrain.protocol.messages import DigestReply, Digests


class CustodyRules(MemberPart):
    """Rules that act on the parts of `Custody`. They own no data."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._custody = machine.custody

    def progress(self) -> bool:
        """Create the initial state, or end this member if it is faulty. Returns True if it did anything."""
        return self._create() or self._custody.repair.depart(spoils=self._machine.step.audits.is_convicted)

    def _create(self) -> bool:
        """Create the initial state of this member's shards, once the initial parameters are here.

        Returns True if anything was created, asked for or announced.
        """
        if self._machine.views.is_recovering or not self._machine.commit.is_initial:
            return False
        if not self._custody.initial.may_be_made():
            return self._custody.initial.read()
        created = self._custody.primaries.create(self._machine.views.me)
        if self._machine.views.others:
            # A member that becomes the primary before the first commit has nothing else to compare the state with.
            for shard in created:
                self._custody.comparison.look_at_own(shard)
        self._custody.initial.forget(created)
        self._custody.backups.acknowledge(created)
        return self._custody.digest_broadcast.announce_initial() or bool(created)

    @handles(p.GradientsFinished)
    def on_gradients_finished(self, event: p.GradientsFinished) -> None:
        """Note finished gradients. Begins the step anew if one of their lanes was damaged."""
        self._machine.step.reduction.on_finished(event)
        if event.step == self._machine.step.number:
            self._custody.repair.on_lanes_damaged(event.damaged)

    @handles(p.PartialDamaged)
    def on_partial_damaged(self, event: p.PartialDamaged) -> None:
        """Begin the step anew, because a partial sum differs from what its maker had."""
        if event.step == self._machine.step.number:
            self._machine.step.reduction.on_damaged(event)
            self._custody.repair.on_damaged(event, self._machine.shape.shards[event.shard].lanes[event.lane])

    @handles(p.TookCopy)
    def on_took_copy(self, event: p.TookCopy) -> None:
        """Note that a copy was taken. Ignored during a recovery, which decides anew which members get copies."""
        if not self._machine.views.is_recovering:
            self._custody.taken.on_taken(event)

    @handles(Digests)
    def on_digests(self, source: str, message: Digests) -> None:
        """Note a primary's digests: of published parameters, and of states for its backups."""
        if message.step == self._machine.commit.step:
            self._custody.comparison.tell(source, message.parameters)
        self._custody.backups.on_digests(source, message)

    @handles(p.GradientsKept)
    def on_gradients_kept(self, event: p.GradientsKept) -> None:
        """Acknowledge intact gradients of the open step. Begins the step anew for damaged ones.

        Damage to a gradient of an older step is detected by comparing the update instead.
        """
        if self._custody.backups.on_kept(event):
            for shard in event.damaged:
                self._custody.repair.on_gradient_damaged(shard)

    @handles(DigestReply)
    def on_reply(self, source: str, message: DigestReply) -> None:
        """Pass the answer on to the part that has asked: about parameters, a broken copy, or a backup's update."""
        if message.step != self._machine.commit.step:
            return
        # A broken copy comes first: until it is taken, this member has no state that could be in doubt.
        if message.parameters:
            self._custody.comparison.on_reply(source, message.shard, message.digest)
        elif self._custody.taken.is_about(message.shard):
            self._custody.taken.on_reply(source, message)
        else:
            self._custody.mismatches.on_reply(source, message)
