"""Put right what was found wrong: the open step begins anew, on all members, from what is known to be right.

Whatever it was that changed (a sum on its way, parameters, a state), there is one repair. Who knows of it says so in
its report of the next view, which it asks for: the recovery makes states from those who have them right, has parameters
published again, and has the open step computed again. Nothing of that step was committed, because who has found
something wrong does not vote.
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
"""A member's own faults in its life: with the last it ends. One bit may flip in any memory; two are a bad memory."""
TRIES_MAX = 6
"""So often a member begins one and the same step anew: then the job ends, because it would never come to its end."""


class Repair(MemberPart):
    """Owns what is wrong of the open step, and how often this member was at fault."""

    def __init__(self, views: Views, commit: Commit, holdings: Holdings, out: Commands) -> None:
        self.is_due = False
        """Something is wrong of the open step: nothing of it counts, and this member does not vote."""
        self.is_new = False
        """Something was found after this member had reported: the recovery under way does not know of it."""
        self.stands = False
        """The open step was begun anew. In each view that is said again, until it is committed: some may have died."""
        self.wrong: set[tuple[int, str]] = set()
        """Shards whose parameters somebody has computed with that were not right, and the holder who had them wrong."""
        self.given_up: set[int] = set()
        """Shards whose state was wrong here: what is asked about them is answered by the recovery."""
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._out = out
        self._tries = 0
        """How often the open step was begun anew at this member's wish."""
        self._faults: list[str] = []
        """What was wrong in this member's memory, in its life."""
        self._unproven: dict[int, str] = {}
        """Shard -> what is this member's fault unless the shard's publisher turns out to be wrong."""

    # ------------------------------------------------------------------------------------------------- what is wrong

    def begin_anew(self, reason: str, wrong: Mapping[int, str] | None = None, *, tells: bool = True) -> None:
        """Have the open step begun anew. `wrong`: shards whose parameters all take again -> the holder who is wrong."""
        # Kept even where the step begins anew for another reason already: the recovery has to know all of it.
        self.wrong.update((wrong or {}).items())
        self.is_due = True
        # Once per view: what is found besides goes along.
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
        """Give up this member's state of the shard, which is wrong: others have it, or the job ends with its loss."""
        held = self._holdings.find(shard)
        if held is None:
            return
        held.difference = None  # it is known now which side is wrong
        self.given_up.add(shard)
        self._holdings.disown(shard)
        self._faults.append(reason)
        # What a primary has published came from that very state; of a backup's nobody has got anything.
        if self._commit.roles.is_mine(shard):
            self._commit.parameters.lose(shard)
            self.begin_anew(reason, {shard: self._views.me})
        else:
            self.begin_anew(reason)

    def own_fault(self, reason: str) -> None:
        """Count a fault in this member's memory that is in no shard's state."""
        # Counted at once: who wishes the step anew is not yet at fault, but whose memory has changed is.
        self._faults.append(reason)
        self.begin_anew(reason)

    def came_wrong(self, shard: int, reason: str) -> None:
        """Take parameters again: those here are not what was published, or the digest told was of wrong ones."""
        # Not its fault yet: where the publisher's own state turns out to be wrong, this member had the right ones.
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
        # Before the view that is asked for: there the maker lets go of what it is to look at.
        self._out.send(event.maker, Damaged(step=event.step, block=block, node=event.node, shard=event.shard))
        self.begin_anew(f"the gradient {what} that {event.maker} has made came to {me} changed")

    def on_lanes_damaged(self, shards: Sequence[int]) -> None:
        """Handle sums of lanes that have changed while they waited for the shard's other lanes."""
        # Nobody is at fault for it: a sum may still lie with its maker, or here.
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
        """Look at a partial that came to another member changed, so that it is known whose memory is at fault."""
        # Nothing has to be sent again: the view that comes lets all compute it again.
        if message.step == self._commit.step + 1:
            self._out.do(p.CheckPartial(step=message.step, block=message.block, node=message.node))

    @handles(p.PartialChecked)
    def on_partial_checked(self, event: p.PartialChecked) -> None:
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
        """What the report says is wrong. What is found from now on comes too late for it."""
        self.is_new = False
        return tuple(sorted(self.wrong)) if self.is_due or self.stands else None

    def resume(self, recovery: Recovery) -> None:
        """Note what all members know to be wrong, as they have reported it."""
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
        """Wait until the step has begun anew: what is known to be wrong is never committed."""
        return "something of the step was found to be wrong: it begins anew" if self.is_due else ""

    def begin(self, step: int) -> None:
        """Forget what was wrong of the step before: it is committed, so the last attempt was right."""
        # All members know by now what this one knew, since all have voted for the step that was computed anew.
        self._tries = 0
        self.is_due = self.is_new = self.stands = False
        self.wrong.clear()
        self._faults += self._unproven.values()
        self._unproven.clear()

    def depart(self, *, spoils: bool) -> bool:
        """End this member after its second fault, once others know all that it knows, and have all that it has.

        Returns True if it has ended.
        """
        # With one that `spoils` the open step, as all know, it would never be committed.
        if len(self._faults) < FAULTS_MAX or self.is_due or (self.stands and not spoils):
            return False
        live, me = self._commit.roles.live, self._views.me
        # Nor before it has compared what others have made of the step: they may have nobody else who could tell.
        backed = (shard for shard, holders in enumerate(live) if me in holders.backups)
        if not all(self._holdings.has(shard, self._commit.step) for shard in backed):
            return False
        # The only holder of a state stays: a bad memory that is noticed is better than no job.
        if any(holders.primary == me and not holders.backups for holders in live):
            return False
        times = f"it is fault {len(self._faults)} of {self._views.me}, whose machine should be looked at"
        self._out.fail("CorruptedError", f"{self._faults[-1]}; {times}")
        return True
