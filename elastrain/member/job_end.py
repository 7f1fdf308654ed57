"""End of the training loops: the step before which each loop ended, and a decision if not all have ended.

Loops end by `until`, or by a decision of each script (`break`). If the scripts differ, the majority of the members
decides for all. The step in question cannot be committed meanwhile, since a commit needs all members.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import EndsBefore, GoesOn, HasAll


def job_ends(voters: Sequence[str], left: Collection[str], going: Collection[str]) -> bool | None:
    """Return True if more than half of the `voters` (in rank order) have left their loops, None if that is still open.

    If both halves are equal, the half with the lowest rank decides.
    """
    # A newcomer's loop may decide by counters that were not handed over. It has no vote while others have one.
    votes_left, votes_going = (sum(voter in side for voter in voters) for side in (left, going))
    # This decides as soon as the missing votes cannot change the result, so no member waits for one that still
    # computes.
    if 2 * max(votes_left, votes_going) > len(voters):
        return votes_left > votes_going
    if votes_left + votes_going == len(voters):
        return voters[0] in left
    return None


class JobEnd(MemberPart):
    """Part that owns, for each member, the step before which its loop has ended or which it is in."""

    def __init__(self, me: str, views: Views, out: Commands) -> None:
        self.step: int | None = None
        """The step before which this member's loop has ended, or has to end."""
        self._me = me
        self._views = views
        self._out = out
        self._ended: dict[str, int] = {}
        """Member -> step before which its training loop ended."""
        self._whole: set[str] = set()
        """Members that have received all blocks that they keep at the end."""
        self.has_room_for_all = True
        """True if this member's memory limit, if any, leaves room for all blocks."""
        self._going: dict[str, int] = {}
        """Member -> step that its loop is in, for members that go on although others have ended before that step."""
        self._asked = -1
        """Step in which this member's loop last asked for work."""
        self.is_checkpoint_wished = False
        """True if any member asked for a checkpoint of the last step after the votes on it."""
        self._is_overruled = False
        """True if this member's loop would have gone on, but the majority has ended."""

    def forget_view(self) -> None:
        """Forget which loops have ended or go on: every member says it again in the next view."""
        # These messages may have reached some members only. In the next view every member sends them again.
        self._ended.clear()
        self._whole.clear()
        self._going.clear()

    # -------------------------------------------------------------------------------------------------- what is known

    def on_asked(self, step: int) -> None:
        """Note that this member's loop is in `step` and asks for work."""
        self._asked = step
        self._go_on()

    def on_loop_ended(self, step: int) -> None:
        """Note that this member's loop has ended before `step`."""
        self.step = step

    def on_ends_before(self, source: str, message: EndsBefore) -> None:
        """Note the step before which a member's loop has ended, and if a checkpoint was asked for there."""
        self._ended[source] = message.step
        self.is_checkpoint_wished |= message.is_checkpoint_wished
        self._go_on()

    def wish_checkpoint(self) -> None:
        """Note that a checkpoint of the last step was asked for after the votes on it."""
        self.is_checkpoint_wished = True

    @handles(HasAll)
    def on_has_all(self, source: str, message: HasAll) -> None:
        """Note that a member has received all blocks that it keeps at the end."""
        # Only blocks of the last step count: those of an older one are not the result.
        if self._ended.get(source) == message.step + 1:
            self._whole.add(source)

    @handles(GoesOn)
    def on_goes_on(self, source: str, message: GoesOn) -> None:
        """Note the step that a member's loop is in, while others have ended before it."""
        self._going[source] = message.step

    def _go_on(self) -> None:
        """Tell the others that this loop goes on, if members have ended before its step. All count these members."""
        # Nothing is sent unless some member has ended: most jobs end on all members at once.
        if self.step is None and any(self._asked >= step for step in self._ended.values()):
            self._going[self._me] = self._asked
            self._out.send_all(self._views.others, GoesOn(step=self._asked))

    def is_to_be_told(self) -> bool:
        """Return True if this loop has ended and the other members do not know it yet."""
        return self.step is not None and self._me not in self._ended

    @property
    def keeps_own(self) -> bool:
        """True if this member's memory limit has no room for all blocks. Rank 0 takes them all anyway."""
        return not self.has_room_for_all and self._views.view.ids[0] != self._me

    def tell(self) -> None:
        """Tell the other members the step before which this loop has ended."""
        assert self.step is not None
        self._ended[self._me] = self.step
        self._out.send_all(
            self._views.others,
            EndsBefore(step=self.step, keeps_own=self.keeps_own, is_checkpoint_wished=self.is_checkpoint_wished),
        )

    def has_told(self) -> bool:
        """Return True if this member has announced the end of its loop to the others."""
        return self._me in self._ended

    def stage(self) -> tuple[int | None, bool, bool]:
        """Return the step before which this loop ends (or None), if that was announced, and if all blocks are here."""
        return self.step, self.has_told(), self._me in self._whole

    def tell_all_is_here(self, step: int) -> None:
        """Tell the other members that all blocks are here, so that they need not wait for this member."""
        if self._me not in self._whole:
            self._whole.add(self._me)
            self._out.send_all(self._views.others, HasAll(step=step))

    # ------------------------------------------------------------------------------------------------------- the end

    def judge(self) -> None:
        """Decide by majority if the job ends or goes on. All members decide alike, since no member changes its vote."""
        if self._views.is_recovering or not self._ended:
            return
        # The first end decides: a loop that has ended cannot take part in the step that it has not entered.
        step = min(self._ended.values())
        going = [m for m, asked in self._going.items() if asked >= step and m not in self._ended]
        ends = job_ends(self._views.voters(), self._ended, going)
        if ends is None:
            return
        if self.step is not None and not ends:
            self._out.fail(
                "StoppedError",
                f"the training loop was left here before step {self.step}, but {', '.join(going)} went on: leave "
                "it on all members after the same step",
            )
        elif self.step is None and ends and self._asked >= step:
            self._is_overruled, self.step = True, step

    def have_all_ended(self) -> bool:
        """Return True if the loops of all members of this view have ended."""
        current = self._views.current
        return self.step is not None and current is not None and self._ended.keys() >= set(current.ids)

    def leave_together(self, *, whole: bool) -> None:
        """Leave once all loops have ended. Until then another member may need what this one has.

        whole: blocks are still to be sent, so that this also waits until every member has all that it keeps.
        """
        if self.have_all_ended() and (not whole or self._whole >= set(self._views.view.ids)):
            self.let_go()

    def note_room(self, *, has_room_for_all: bool) -> None:
        """Note if this member's memory has room for all blocks."""
        self.has_room_for_all = has_room_for_all

    @handles(p.JobEnded)
    def on_job_ended(self, event: p.JobEnded) -> None:
        """Leave, because a member has left after the job's end: all members had the last step."""
        self.let_go()

    def let_go(self) -> None:
        """Leave the job."""
        self._out.leave(overruled=self._is_overruled)
