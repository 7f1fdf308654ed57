"""Rules for the end of the training loops: tell the others, agree, get all blocks again, leave together.

A checkpoint that was asked for after the votes on the last step is written before the members leave. Rank 0 has every
block at the end. So has every other member whose memory limit allows it.
"""

from __future__ import annotations

from dataclasses import replace

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import Checkpointed, Wish
from elastrain.member.commit_rules import Committing
from elastrain.member.contract import MemberPart, handles
from elastrain.member.parts import Machine
from elastrain.protocol.messages import EndsBefore, TakeLast


class Ending(MemberPart):
    """Rules of the end. They act on all parts and own no data; `JobEnd` knows which loops have ended."""

    def __init__(self, machine: Machine, committing: Committing) -> None:
        self._machine = machine
        self._committing = committing

    def progress(self) -> bool:
        """Take the next possible steps towards the end. Returns True if there was one."""
        m = self._machine
        before = self._stage()
        self._tell()
        m.end.judge()
        self._tell()  # the verdict may have ended this member's loop
        self._tell_all_is_here()
        if not self._awaits_checkpoint():
            m.end.leave_together(whole=not m.replicas.are_all)
        return self._stage() != before

    def _stage(self) -> tuple[object, ...]:
        m = self._machine
        return m.end.stage(), m.checkpointing.open is not None, m.out.is_closed

    @handles(p.Ready)
    def on_ready(self, event: p.Ready) -> None:
        """Note that this member's loop asks for work."""
        self._machine.loop.on_ready(event)
        self._machine.end.on_asked(self._machine.loop.step)

    @handles(p.LoopEnded)
    def on_loop_ended(self, event: p.LoopEnded) -> None:
        """Note that this member's loop has ended, and whether a checkpoint was asked for too late."""
        m = self._machine
        record = m.commit.record
        m.loop.on_ended(event)
        m.end.on_loop_ended(event.step)
        is_passed_over = record is not None and record.checkpoint is Checkpointed.PASSED_OVER
        if is_passed_over or m.checkpointing.wanted is not Wish.NONE:
            m.end.wish_checkpoint()

    @handles(TakeLast)
    def on_take_last(self, message: TakeLast) -> None:
        """Begin the checkpoint of the last step, because the member of rank 0 asks for it."""
        self.take_last(message.step)

    def take_last(self, step: int) -> None:
        """Write this member's part of a checkpoint of the last step, although its commit record asked for none."""
        m = self._machine
        record = m.commit.record
        if record is None or record.step != step or m.checkpointing.open is not None or m.checkpointing.is_over(step):
            return
        m.end.wish_checkpoint()
        m.checkpointing.on_passed(replace(record, checkpoint=Checkpointed.TAKEN), m.commit.roles.live)
        m.checkpointing.on_began(m.loop.step, m.loop.state)

    @handles(EndsBefore)
    def on_ends_before(self, source: str, message: EndsBefore) -> None:
        """Note that a member's loop has ended, and send the member the blocks that it still lacks."""
        m = self._machine
        m.end.on_ends_before(source, message)
        if not message.keeps_own:
            self._serve(source)

    def _serve(self, member: str) -> None:
        """Publish to a member whose loop has ended the parameters that it did not need until now."""
        m = self._machine
        lent = m.replicas.lent
        had = m.replicas.wanted(member, lent)
        m.replicas.end(member)
        if not m.replicas.are_all:
            lacking = {member: [shard for shard in lent if shard not in had]}
            self._committing.publish(m.custody.primaries.hold_back(lacking), m.commit.record)

    def _awaits_checkpoint(self) -> bool:
        """Return True while the last step is to become a checkpoint; rank 0 begins it once all loops have ended."""
        m = self._machine
        step, written = m.commit.step, m.checkpointing
        if not m.end.is_checkpoint_wished or m.commit.record is None or written.is_over(step):
            return written.open is not None
        if (
            written.open is None
            and not m.views.is_recovering
            and m.end.have_all_ended()
            and m.views.view.ids[0] == m.me
        ):
            m.out.send_all(m.views.others, TakeLast(step=step))
            self.take_last(step)
        return True

    def _tell(self) -> None:
        m = self._machine
        # Leaving waits for an open checkpoint: a member that leaves takes unwritten state with it.
        is_written = m.checkpointing.open is None
        if not m.end.is_to_be_told() or not is_written or not self._committing.is_settled():
            return
        # A loop that was overruled may still compute a task. Blocks must not arrive in the middle of it.
        if m.replicas.are_all or not m.loop.is_computing:
            m.end.tell()
            if not m.end.keeps_own:
                m.replicas.end(m.me)
            if not m.commit.parameters.are_here():
                m.custody.comparison.forget_found()

    def _tell_all_is_here(self) -> None:
        m = self._machine
        # Compared, too: these parameters are what the job ends with.
        is_whole = m.end.has_told() and m.commit.parameters.are_here() and self._committing.is_settled()
        if is_whole and not m.replicas.are_all:
            m.end.tell_all_is_here(m.commit.step)
