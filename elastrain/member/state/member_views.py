"""Views of this member: the present one, the newest known one, and messages that came too early.

After each change of view all members report to each other. `is_recovering` is true until the decision that follows from
the reports is carried out.
"""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.job.values import Recovery, Report
from elastrain.job.world import View
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands


class Views(MemberPart):
    """Part that owns the member's views, the reports of the present view, and the messages that wait."""

    def __init__(self, me: str, out: Commands) -> None:
        self.me = me
        self.current: View | None = None
        self.newest: View | None = None
        self.is_recovering = True
        self.reports: dict[str, Report] = {}
        self.may_commit = False
        """True if the store knows that the job's first commit may have been made, so that the job never starts over."""
        self._asked_in = 0
        """Generation in which this member last asked for `may_commit`."""
        self._out = out
        self._waiting: list[p.Arrived] = []

    @property
    def view(self) -> View:
        """The present view. Must not be read before the first view."""
        assert self.current is not None
        return self.current

    @property
    def others(self) -> list[str]:
        """Members of the present view except this one."""
        return [m for m in self.current.ids if m != self.me] if self.current else []

    # ------------------------------------------------------------------------------------------------ changes of view

    def on_view(self, view: View) -> bool:
        """Note a view from the launcher. Returns True if this member has to go on to it at once."""
        # The launcher sends a view more than once, and the store's news may come late.
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
        """Note that the store knows that the job's first commit is due. From here on the commit may be made."""
        self.may_commit = True

    @handles(Report)
    def on_report(self, source: str, message: Report) -> None:
        """Note where a member of this view stands."""
        self.reports[source] = message

    def must_switch_now(self, view: View) -> bool:
        """Return True if the view cannot wait for the commit whose record names it.

        A view that only adds members waits for that commit, on all members alike.
        """
        # A loss cannot wait: without the lost member's vote, or without links to a member, the step is never committed.
        before = self.current
        if before is None or set(before.ids) - set(view.ids):
            return True
        # A step that was found wrong is never committed, either.
        return max(view.links_since, view.anew_since) > before.generation

    def is_left_behind(self) -> bool:
        """Return True if a member of this view is already in a newer one: no commit is possible here without it.

        A newcomer does not count. It begins in the newer view, and its report waits for the commit that lets it in.
        """
        view, newest = self.current, self.newest
        if view is None or newest is None:
            return False
        return any(view.generation < a.generation <= newest.generation and a.source in view for a in self._waiting)

    def ask_to_commit(self) -> bool:
        """Ask the launcher to note the job's first commit in the store. Returns True if this call has asked."""
        if self._asked_in >= self.view.generation:
            return False
        self._asked_in = self.view.generation
        self._out.do(p.AskToCommit())
        return True

    def switch(self, step: int) -> None:
        """Go on to the newest view while `step` is open. Messages of older generations are dropped."""
        assert self.newest is not None
        self.current = self.newest
        self.is_recovering = True
        self.reports = {}
        # Messages of this view or a newer one are kept. They are handled after the decision.
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
        """Return True if all members have reported. A report that never comes leads to another view, not to a guess."""
        return self.is_recovering and self.current is not None and set(self.reports) >= set(self.current.ids)

    def voters(self) -> tuple[str, ...]:
        """Return the members that had begun to train when this view began, or all if none had."""
        # Counters of a newcomer's script may differ from those of the others.
        members = self.view.ids
        return tuple(m for m in members if self.reports[m].begun >= 0) or members

    def unreported(self, *, is_newcomer: bool) -> tuple[str, ...]:
        """Return the members whose report is missing although they should have answered at once."""
        # A newcomer cannot expect it: the others finish their step first, however long that takes. In the first view
        # all begin together.
        if not self.is_recovering or self.current is None or (is_newcomer and self.current.generation > 1):
            return ()
        return tuple(m for m in self.current.ids if m not in self.reports)

    # ------------------------------------------------------------------------------------------- messages that wait

    def is_stale(self, arrival: p.Arrived) -> bool:
        """Return True if the message is of an older view."""
        # A member that left the view may have been slow, not dead. Its messages must not count.
        return self.current is not None and arrival.generation < self.current.generation

    def is_ahead(self, arrival: p.Arrived) -> bool:
        """Return True if the message is of a newer view."""
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
        """Return the messages that wait, and begin with an empty list."""
        waiting, self._waiting = self._waiting, []
        return waiting
