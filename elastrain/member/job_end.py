"""The end of the training loops: before which step each member's ended, and what follows when not all have.

Loops end by `until`, or by a decision of each script (`break`). Where these differ, the majority of the members decides
for all: nothing of the step in question can be committed meanwhile, since that needs everybody.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from elastrain import protocol as p
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import EndsBefore, GoesOn, HasAll


def job_ends(voters: Sequence[str], left: Collection[str], going: Collection[str]) -> bool | None:
    """Whether more than half of the `voters` (in rank order) have left their loops; None: that is open yet.

    Where the two halves are equal, the lowest rank is in the one that decides.
    """
    # A newcomer's loop may decide by counters that nobody handed over: it has no vote while others have one.
    votes_left, votes_going = (sum(voter in side for voter in voters) for side in (left, going))
    # Decided as soon as the rest cannot change it: a member that still computes is not waited for.
    if 2 * max(votes_left, votes_going) > len(voters):
        return votes_left > votes_going
    if votes_left + votes_going == len(voters):
        return voters[0] in left
    return None


class JobEnd(MemberPart):
    """Owns who has ended before which step, and who goes on."""

    def __init__(self, me: str, views: Views, out: Commands) -> None:
        self.step: int | None = None
        """The step before which this member's loop has ended, or has to end."""
        self._me = me
        self._views = views
        self._out = out
        self._ended: dict[str, int] = {}
        """Member -> step before which its training loop ended."""
        self._whole: set[str] = set()
        """Members that have all blocks that they are to have at the end."""
        self.has_room_for_all = True
        """This member's memory limit, if it has one, leaves room for all blocks."""
        self._going: dict[str, int] = {}
        """Member -> step that its training loop is in, while others have ended before it."""
        self._asked = -1
        """Step in which this member's loop asked for work last."""
        self.is_checkpoint_wished = False
        """A member has asked for a checkpoint of the last step after the votes on it."""
        self._is_overruled = False
        """This member's loop would have gone on: the majority has ended before it."""

    def forget_view(self) -> None:
        # What was told may have reached some only: in the next view everybody says it again.
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

    def on_ends_before(self, source: str, step: int) -> None:
        self._ended[source] = step
        self._go_on()

    @handles(HasAll)
    def on_has_all(self, source: str, message: HasAll) -> None:
        """Note that a member has all blocks that it is to have at the end."""
        # Only blocks of the last step count: those of an older one are not the result.
        if self._ended.get(source) == message.step + 1:
            self._whole.add(source)

    @handles(GoesOn)
    def on_goes_on(self, source: str, message: GoesOn) -> None:
        """Note the step that a member's loop is in, while others have ended before it."""
        self._going[source] = message.step

    def _go_on(self) -> None:
        """Tell the others that this loop goes on, where some have ended before its step: all count who is in it."""
        # Only members that are asked by somebody's end have to answer: most jobs end everywhere at once.
        if self.step is None and any(self._asked >= step for step in self._ended.values()):
            self._going[self._me] = self._asked
            self._out.send_all(self._views.others, GoesOn(step=self._asked))

    def is_to_be_told(self) -> bool:
        """Whether this loop's end is known here and not yet to the others."""
        return self.step is not None and self._me not in self._ended

    @property
    def keeps_own(self) -> bool:
        """Whether this member takes no more blocks at the end: not all have room for them, but rank 0 must."""
        return not self.has_room_for_all and self._views.view.ids[0] != self._me

    def tell(self) -> None:
        assert self.step is not None
        self._ended[self._me] = self.step
        self._out.send_all(
            self._views.others,
            EndsBefore(step=self.step, keeps_own=self.keeps_own, is_checkpoint_wished=self.is_checkpoint_wished),
        )

    def has_told(self) -> bool:
        return self._me in self._ended

    def stage(self) -> tuple[int | None, bool, bool]:
        """Return before which step this loop ends, and whether the others know that, and that all blocks are here."""
        return self.step, self.has_told(), self._me in self._whole

    def tell_all_is_here(self, step: int) -> None:
        """This member has all blocks that it is to have: the others need not wait for it any more."""
        if self._me not in self._whole:
            self._whole.add(self._me)
            self._out.send_all(self._views.others, HasAll(step=step))

    # ------------------------------------------------------------------------------------------------------- the end

    def judge(self) -> None:
        """Decide whether the job ends: all decide alike, since nobody changes whether it has left or is in the step."""
        if self._views.is_recovering or not self._ended:
            return
        # The first end decides: a loop that has ended cannot take part in the step that it has not begun.
        step = min(self._ended.values())
        going = [m for m, asked in self._going.items() if asked >= step and m not in self._ended]
        ends = job_ends(self._voters(), self._ended, going)
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

    def _voters(self) -> tuple[str, ...]:
        """The members that had begun to train when this view began: a newcomer's own counters may stand elsewhere."""
        members = self._views.view.ids
        return tuple(m for m in members if self._views.reports[m].begun >= 0) or members

    def have_all_ended(self) -> bool:
        """Return True if the loops of all members of this view have ended."""
        current = self._views.current
        return self.step is not None and current is not None and self._ended.keys() >= set(current.ids)

    def leave_together(self, *, whole: bool) -> None:
        """Let go once all have ended: until then somebody may still need what this member has.

        whole: there are blocks to be sent first, so that all have to have what they are to have.
        """
        if self.have_all_ended() and (not whole or self._whole >= set(self._views.view.ids)):
            self.let_go()

    def note_room(self, *, has_room_for_all: bool) -> None:
        """Note whether this member's memory has room for all blocks."""
        self.has_room_for_all = has_room_for_all

    @handles(p.JobEnded)
    def on_job_ended(self, event: p.JobEnded) -> None:
        """Leave, because a member has left in peace: all had the last step."""
        self.let_go()

    def let_go(self) -> None:
        """Leave the job."""
        self._out.leave(overruled=self._is_overruled)
