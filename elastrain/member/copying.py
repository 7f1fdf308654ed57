"""Rules for the time at which shards are copied to new holders: while runs are computed, or before a vote."""

from __future__ import annotations

from collections.abc import Mapping

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles
from elastrain.member.parts import Machine


class Copying(MemberPart):
    """Rules that start copies. They own no data; `CopiesGiven` knows which copies are due."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def short(self) -> Mapping[int, int]:
        """Shard with too few living holders -> step that was open when it was first short."""
        return self._machine.commit.under_replication.since

    @property
    def without_room(self) -> tuple[str, ...]:
        """Members that have no room for copies of this member's shards."""
        return self._machine.commit.roles.without_room

    @property
    def sent_bytes(self) -> int:
        """Bytes of parameters sent to new holders and to shadows so far."""
        return self._machine.custody.given.sent_bytes + self._machine.shadow_feed.sent_bytes

    @property
    def takers(self) -> frozenset[str]:
        """Members to which a copy, or a piece of one, could be sent now.

        Copies are sent while runs are computed, because a vote waits for open copies.
        """
        m = self._machine
        # The driver asks twice in every turn. The cheap test is first, because mostly no copy waits.
        takers = m.custody.given.takers() | m.shadow_feed.takers()
        return frozenset(takers) if takers and m.step.is_computing() and self._may_copy() else frozenset()

    @handles(p.CopyBudgetSet)
    def on_budget_set(self, event: p.CopyBudgetSet) -> None:
        """Note what this member has memory for: copies on their way, copies to keep, and all blocks at the end."""
        self._machine.custody.given.limit(event.parameters_bytes)
        self._machine.custody.taken.refuse(event.refused)
        self._machine.end.note_room(has_room_for_all=event.has_room_for_all)

    @handles(p.CopiesAllowed)
    def copy(self, event: p.CopiesAllowed) -> None:
        """Send copies up to the number of bytes that the driver allows. The rest waits for its next permission."""
        # The vote, or a change of view, may have come in between.
        if self.takers - event.busy:
            # Of a pipeline one piece: the driver looks at the links before the next one.
            allowed_bytes = event.parameters_bytes if self._machine.shape.pipelining is None else 1
            before_bytes = self.sent_bytes
            self._machine.custody.given.send(allowed_bytes, event.busy)
            # Copies come first: a move of blocks can wait.
            self._machine.shadow_feed.send(allowed_bytes - (self.sent_bytes - before_bytes), event.busy)

    def progress(self) -> bool:
        """Send the copies that the vote waits for, once this member has computed its runs.

        Returns True if it sent any.
        """
        m, given = self._machine, self._machine.custody.given
        if m.step.is_computing() or not self._may_copy():
            return False
        sent_bytes = given.sent_bytes
        # If digests take longer than the runs, no copy was possible before. The first copies of the step are sent here.
        if not given.has_moved():
            given.send(1)
        given.send_overdue()
        given.finish()
        return given.sent_bytes > sent_bytes

    def _may_copy(self) -> bool:
        """Return True in a step, before the vote, and while no digests of the states are computed."""
        m = self._machine
        is_in_step = m.loop.step == m.step.number and not m.views.is_recovering
        return is_in_step and not m.custody.digest_broadcast.is_digesting and not m.step.ballot.has_voted
