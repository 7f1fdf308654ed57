"""Repair of what was found wrong: all members begin the open step anew from data that is known to be right.

There is one repair for all faults: a damaged sum, wrong parameters, a wrong state. The member that finds a fault asks
for a new view, and names the fault in its report. The recovery makes states from right copies, has parameters published
again, and has the open step computed again. Nothing of that step was committed, because a member that has found a fault
does not vote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastrain import protocol as p
from elastrain.job.values import Recovery
from elastrain.member.contract import MemberPart, handles
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import Damaged

FAULTS_MAX = 2
"""Number of own faults with which a member ends. One bit may flip in any memory; two faults mean a bad memory."""
TRIES_MAX = 6
"""Number of times that a member begins the same step anew. After that the job ends, as it would make no progress."""


class Repair(MemberPart):
    """Part that owns the faults found in the open step, and the list of this member's own faults."""

    def __init__(self, views: Views, commit: Commit, holdings: Holdings, out: Commands) -> None:
        self.is_due = False
        """True if something of the open step is wrong. This attempt is void, and this member does not vote."""
        self.is_new = False
        """True if a fault was found after this member had reported, so that the recovery under way does not know it."""
        self.stands = False
        """True if the open step was begun anew.

        Every report repeats it until the commit, since some members may be lost.
        """
        self.wrong: set[tuple[int, str]] = set()
        """(shard, holder): a member computed with wrong parameters of the shard, which the holder published (or "")."""
        self.given_up: set[int] = set()
        """Shards whose state was wrong here. Questions about them are not answered: the recovery settles them."""
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._out = out
        self._tries = 0
        """Number of times that this member asked for the open step to begin anew."""
        self._faults: list[str] = []
        """Reasons of all faults in this member's memory since it started."""
        self._unproven: dict[int, str] = {}
        """Shard -> reason of a fault that is this member's unless the shard's publisher turns out to be wrong."""

    # ------------------------------------------------------------------------------------------------- what is wrong

    def begin_anew(self, reason: str, wrong: Mapping[int, str] | None = None, *, tells: bool = True) -> None:
        """Ask for the open step to begin anew. `wrong`: shard whose parameters all take again -> holder at fault."""
        # `wrong` is kept even if the step begins anew already: the recovery has to know all faults.
        self.wrong.update((wrong or {}).items())
        self.is_due = True
        # One request per view is enough. Further faults go along with it.
        if self.is_new:
            return
        self.is_new = True
        self._tries += 1
        if self._tries > TRIES_MAX:
            again = f"{reason}; step {self._commit.step + 1} was begun anew {TRIES_MAX} times for such reasons"
            self._out.fail("DivergedError", f"{again}: start the job again without that machine")
            return
        if tells:
            self._out.do(p.Noticed(reason=f"{reason}; the open step begins anew"))
        self._out.do(p.BeginAnew(generation=self._views.view.generation, reason=reason))

    def give_up(self, shard: int, reason: str) -> None:
        """Give up this member's wrong state of the shard. Other members have a copy, or the job ends."""
        held = self._holdings.find(shard)
        if held is None:
            return
        held.settle()
        self.given_up.add(shard)
        self._holdings.disown(shard)
        self._faults.append(reason)
        # A primary has published parameters from that state. A backup's state has reached no other member.
        if self._commit.roles.is_mine(shard):
            self._commit.parameters.lose(shard)
            self.begin_anew(reason, {shard: self._views.me})
        else:
            self.begin_anew(reason)

    def own_fault(self, reason: str) -> None:
        """Count a fault in this member's memory that is in no shard's state."""
        # It is counted at once, because here this member's own memory has changed.
        self._faults.append(reason)
        self.begin_anew(reason)

    def came_wrong(self, shard: int, reason: str) -> None:
        """Take parameters again, because those here differ from the published digest. One of the two sides is wrong."""
        # It is not this member's fault if the publisher's own state turns out to be wrong.
        self._unproven[shard] = reason
        self._commit.parameters.lose(shard)
        self.begin_anew(reason, {shard: ""})

    # ---------------------------------------------------------------------------------------------- sums on their way

    def on_damaged(self, event: p.PartialDamaged, block: int) -> None:
        """Handle a partial of the open step that differs from what its maker had."""
        me, (first, last) = self._views.me, (event.node[0], event.node[1] - 1)
        runs = f"runs {first} to {last}" if last > first else f"run {first}"
        what = f"for shard {event.shard} over {runs} of step {event.step}"
        if event.maker in ("", me):
            self.own_fault(f"the sum of gradients {what} has changed in the memory of {me}")
            return
        # This is sent before the new view, in which the maker drops the partial that it has to check.
        self._out.send(event.maker, Damaged(step=event.step, block=block, node=event.node, shard=event.shard))
        self.begin_anew(f"the gradient {what} that {event.maker} has made came to {me} changed")

    def on_lanes_damaged(self, shards: Sequence[int]) -> None:
        """Handle lane sums that have changed while they waited for the shard's other lanes."""
        # No member is named at fault: the sum may lie in its maker's memory, or here.
        for shard in shards:
            step = self._commit.step + 1
            self.begin_anew(f"the sum of gradients for shard {shard} of step {step} came to {self._views.me} changed")

    def on_gradient_damaged(self, shard: int) -> None:
        """Handle a finished gradient of the open step that differs from what its primary had."""
        step, primary = self._commit.step + 1, self._commit.roles.live[shard].primary
        if primary == self._views.me:
            self.own_fault(f"the gradient of shard {shard} of step {step} has changed in the memory of {primary}")
            return
        came = f"came to {self._views.me} changed"
        self.begin_anew(f"the gradient of shard {shard} of step {step} that {primary} finished {came}")

    @handles(Damaged)
    def on_told_damaged(self, message: Damaged) -> None:
        """Check a partial that reached another member changed, to learn whose memory is at fault."""
        # Nothing is sent again: all members compute it again in the next view.
        if message.step == self._commit.step + 1:
            self._out.do(p.CheckPartial(step=message.step, block=message.block, node=message.node))

    @handles(p.PartialChecked)
    def on_partial_checked(self, event: p.PartialChecked) -> None:
        """Count an own fault if the partial has changed here since it was sent."""
        if not event.is_intact:
            what = f"the gradient of block {event.block} of step {event.step}"
            self.own_fault(f"{what} has changed in the memory of {self._views.me} since it was sent")

    def convict(self, reasons: Sequence[str]) -> None:
        """Count the faults by which audits have shown that what this member computes is wrong."""
        self._faults += reasons
        for reason in reasons:
            self._out.do(p.Noticed(reason=reason))

    # ------------------------------------------------------------------------------------------------- when it is done

    def known(self) -> tuple[tuple[int, str], ...] | None:
        """Return the faults for the report, or None if there are none. Later faults need another view."""
        self.is_new = False
        return tuple(sorted(self.wrong)) if self.is_due or self.stands else None

    def resume(self, recovery: Recovery) -> None:
        """Note the faults that all members have reported."""
        me = self._views.me
        for shard, holder in recovery.wrong or ():
            self._unproven.pop(shard if holder else -1, None)  # it was the publisher
            if holder == me and (shard, me) not in self.wrong:
                self._faults.append(f"others have shown that the state of shard {shard} was wrong at {me}")
        self.stands = self.stands or recovery.wrong is not None
        self.wrong.update(recovery.wrong or ())
        self.is_due = self.is_new
        if not self.is_new:
            self._holdings.drop_disowned(self.given_up)
            self.given_up.clear()

    def why_not_yet(self) -> str:
        """Wait until the step has begun anew: faulty data is never committed."""
        return "something of the step was found to be wrong: it begins anew" if self.is_due else ""

    def begin(self, step: int) -> None:
        """Forget the faults of the last step: it is committed, so its last attempt was right."""
        # All members know the faults by now, since all have voted for the repeated step.
        self._tries = 0
        self.is_due = self.is_new = self.stands = False
        self.wrong.clear()
        self._faults += self._unproven.values()
        self._unproven.clear()

    def depart(self, *, spoils: bool) -> bool:
        """End this member after its second fault, once the others have all that it knows and holds.

        Returns True if it has ended. spoils: all members know that this one computes the open step wrongly.
        """
        # A member that `spoils` the open step does not wait for its commit: with that member it would never come.
        if len(self._faults) < FAULTS_MAX or self.is_due or (self.stands and not spoils):
            return False
        live, me = self._commit.roles.live, self._views.me
        # It first compares its backups with their primaries: there may be no other copy to compare with.
        backed = (shard for shard, holders in enumerate(live) if me in holders.backups)
        if not all(self._holdings.has(shard, self._commit.step) for shard in backed):
            return False
        # The only holder of a state stays: a bad memory that is noticed is better than no job.
        if any(holders.primary == me and not holders.backups for holders in live):
            return False
        times = f"it is fault {len(self._faults)} of {self._views.me}, whose machine should be looked at"
        self._out.fail("CorruptedError", f"{self._faults[-1]}; {times}")
        return True
