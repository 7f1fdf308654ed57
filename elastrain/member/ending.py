"""The end of the training loops in its order: tell the others, agree, have every block again, leave together.

Rank 0 has every block then, and so has everybody else whose memory limit leaves room for that.
"""

from __future__ import annotations

from elastrain.member.committing import Committing
from elastrain.member.machine import Machine


class Ending:
    """Rules of the end, over the parts; owns nothing. Who has ended is in `JobEnd`."""

    def __init__(self, machine: Machine, committing: Committing) -> None:
        self._machine = machine
        self._committing = committing

    def go_on(self) -> None:
        """Do whatever has become possible."""
        m = self._machine
        self._tell()
        m.end.judge()
        self._tell()  # the verdict may have ended this member's loop
        self._tell_all_is_here()
        m.end.leave_together(whole=not m.replicas.are_all)

    def serve(self, member: str) -> None:
        """The member's loop has ended: publish to it what it did not need until now."""
        m = self._machine
        lent = m.replicas.lent
        had = m.replicas.wanted(member, lent)
        m.replicas.end(member)
        if not m.replicas.are_all:
            lacking = {member: [shard for shard in lent if shard not in had]}
            self._committing.publish(m.custody.primaries.hold_back(lacking), m.commit.record)

    def _tell(self) -> None:
        m = self._machine
        # A checkpoint that is being written is waited for: who leaves takes along what it has not written.
        is_written = m.checkpointing.open is None
        if not m.end.is_to_be_told() or not is_written or not self._committing.is_settled():
            return
        # A loop that was overruled may still be at a task: blocks do not come in the middle of it.
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
