"""Which view this member is in, which newer one it knows, and what came too early to be read.

After each change of view all members report to each other; `is_recovering` is true until the decision that follows
from the reports is carried out.
"""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.job.values import Recovery, Report
from elastrain.job.world import View
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands


class Views(MemberPart):
    """Owns the member's views, the reports of the present one, and the messages that wait."""

    def __init__(self, me: str, out: Commands) -> None:
        self.me = me
        self.current: View | None = None
        self.newest: View | None = None
        self.is_recovering = True
        self.reports: dict[str, Report] = {}
        self.may_commit = False
        """The store knows that the first commit of the job may have been made: nobody begins it anew."""
        self._asked_in = 0
        """The generation in which this member has asked for that."""
        self._out = out
        self._waiting: list[p.Arrived] = []

    @property
    def view(self) -> View:
        """The present view. Only for what cannot happen before there is one."""
        assert self.current is not None
        return self.current

    @property
    def others(self) -> list[str]:
        return [m for m in self.current.ids if m != self.me] if self.current else []

    # ------------------------------------------------------------------------------------------------ changes of view

    def on_view(self, view: View) -> bool:
        """Note the view that the launcher tells of; true where this member has to go on to it at once."""
        # The launcher tells of a view more than once, and the store's news may come late.
        if self.newest is not None and view.generation <= self.newest.generation:
            return False
        if self.me not in view:
            if self.current is not None:  # a newcomer is not in the views before its own
                self._out.leave(evicted=True)
            return False
        self.newest = view
        return self.must_switch_now(view) or self.is_left_behind()

    @handles(p.CommitAllowed)
    def on_commit_allowed(self, event: p.CommitAllowed) -> None:
        """Note that the store knows of the first commit before it is made."""
        self.may_commit = True

    @handles(Report)
    def on_report(self, source: str, message: Report) -> None:
        """Note where a member of this view stands."""
        self.reports[source] = message

    def must_switch_now(self, view: View) -> bool:
        """A view that only adds members waits for the commit whose record names it, for everyone alike."""
        # A loss cannot wait: without the lost member's vote the step is never committed. Nor without links to it.
        before = self.current
        if before is None or set(before.ids) - set(view.ids):
            return True
        # And where something of the open step was found wrong, it is never committed.
        return max(view.links_since, view.anew_since) > before.generation

    def is_left_behind(self) -> bool:
        """One of this view has gone on to a view that this member knows: nothing can be committed here without it.

        A newcomer has not gone on, it begins there: its report waits for the commit that lets it in.
        """
        view, newest = self.current, self.newest
        if view is None or newest is None:
            return False
        return any(view.generation < a.generation <= newest.generation and a.source in view for a in self._waiting)

    def ask_to_commit(self) -> bool:
        """Have the store told before anything is committed for the first time. Returns True if this call has asked."""
        if self._asked_in >= self.view.generation:
            return False
        self._asked_in = self.view.generation
        self._out.do(p.AskToCommit())
        return True

    def switch(self, step: int) -> None:
        """Go on to the newest view while `step` is tried: nothing of older generations is read any more."""
        assert self.newest is not None
        self.current = self.newest
        self.is_recovering = True
        self.reports = {}
        # What comes from this view or a newer one was kept: it is read when the decision has been carried out.
        self._waiting = [arrival for arrival in self._waiting if not self.is_stale(arrival)]
        self._out.do(p.EditMesh(view=self.current, step=step))

    def resume(self, recovery: Recovery) -> None:
        """End the recovery: its decision is carried out."""
        self.is_recovering = False

    def why_not_yet(self) -> str:
        """Wait until the view is in order: votes of a view are void in the next."""
        return "a change of the view is under way" if self.is_recovering else ""

    # -------------------------------------------------------------------------------------------------------- reports

    def may_decide(self) -> bool:
        """Whether all members have reported. A report that never comes leads to another view, not to a guess."""
        return self.is_recovering and self.current is not None and set(self.reports) >= set(self.current.ids)

    def unreported(self, *, is_newcomer: bool) -> tuple[str, ...]:
        """Members whose report is missing although they are in the view already, and would have answered at once."""
        # Nobody owes it to a newcomer: in its view the others are at the end of their step, however long that takes.
        # Only in the first view do all begin together.
        if not self.is_recovering or self.current is None or (is_newcomer and self.current.generation > 1):
            return ()
        return tuple(m for m in self.current.ids if m not in self.reports)

    # ------------------------------------------------------------------------------------------- messages that wait

    def is_stale(self, arrival: p.Arrived) -> bool:
        # Who is no longer in the view may have been slow, not dead: what it says would be taken for the others' word.
        return self.current is not None and arrival.generation < self.current.generation

    def is_ahead(self, arrival: p.Arrived) -> bool:
        return self.current is None or arrival.generation > self.current.generation

    def hold(self, arrival: p.Arrived) -> None:
        """Keep a message of a newer view until this member is in it."""
        if self.newest is None or arrival.generation > self.newest.generation:
            self._out.do(p.ReadView(generation=arrival.generation))
        self._waiting.append(arrival)

    def put_off(self, arrival: p.Arrived) -> None:
        """Keep a message of this view for a state that this member reaches later."""
        self._waiting.append(arrival)

    def take_waiting(self) -> list[p.Arrived]:
        waiting, self._waiting = self._waiting, []
        return waiting
