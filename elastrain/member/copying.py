"""When shards are copied to new holders: in the time that the driver has while runs are computed, or before a vote."""

from __future__ import annotations

from collections.abc import Mapping

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles
from elastrain.member.parts import Machine


class Copying(MemberPart):
    """Rules over the parts; owns nothing. What is copied is in `CopiesGiven`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    @property
    def short(self) -> Mapping[int, int]:
        """Shards with fewer living holders than they should have -> the step that was open when that began."""
        return self._machine.commit.shortage.since

    @property
    def sent_bytes(self) -> int:
        """Of parameters, sent to new holders so far."""
        return self._machine.custody.given.sent_bytes

    @property
    def is_time(self) -> bool:
        """Whether a copy would be sent as soon as the driver has time: while runs are computed, since a vote waits."""
        m = self._machine
        # Asked twice in every turn of the driver, and mostly nothing waits.
        return m.custody.given.is_waiting() and m.step.is_computing() and self._may_copy()

    @handles(p.CopyBudgetSet)
    def on_budget_set(self, event: p.CopyBudgetSet) -> None:
        """Note how much memory there is for copies, and whether all blocks have room at the end."""
        self._machine.custody.given.limit(event.parameters_bytes)
        self._machine.end.note_room(has_room_for_all=event.has_room_for_all)

    @handles(p.CopiesAllowed)
    def copy(self, event: p.CopiesAllowed) -> None:
        """Send copies in the time that the driver has for them. Others wait for the next time."""
        # Asked again: the vote, or a change of view, may have come in between.
        if self.is_time:
            self._machine.custody.given.send(event.parameters_bytes)

    def copy_at_last(self) -> bool:
        """Send the copies that the vote waits for, once this member has computed. Returns True if it sent any."""
        m, given = self._machine, self._machine.custody.given
        if m.step.is_computing() or not self._may_copy():
            return False
        sent_bytes = given.sent_bytes
        # Where digests take longer than the runs, the first copies of a step are made here.
        if not given.has_moved():
            given.send(1)
        given.send_overdue()
        return given.sent_bytes > sent_bytes

    def _may_copy(self) -> bool:
        """Whether shards can be copied now: in a step, before the vote, and not while their states are digested."""
        m = self._machine
        is_in_step = m.loop.step == m.step.number and not m.views.is_recovering
        return is_in_step and not m.custody.announcements.is_digesting and not m.step.ballot.has_voted
