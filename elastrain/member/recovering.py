"""Rules after a change of view: report, complete the highest committed step, resume the open one.

`recovery.decide` is a pure function of all members' reports; here its decision is carried out. Joins, losses of members
and moves of shards are all handled by this one operation.
"""

from __future__ import annotations

from dataclasses import replace

from elastrain import protocol as p
from elastrain.decisions.recovery import accused, decide, open_plan
from elastrain.decisions.rerouting import Rerouting, reroute
from elastrain.job.values import Recovery, Report, Wrong
from elastrain.member.commit_rules import Committing
from elastrain.member.parts import Machine


class Recovering:
    """Rules of recovery. They act on all parts and own no data."""

    def __init__(self, machine: Machine, committing: Committing) -> None:
        self._machine = machine
        self._committing = committing

    def switch(self) -> None:
        """Go on to the newest view, and send all its members this member's report."""
        m = self._machine
        for part in m.parts:
            part.forget_view()
        m.views.switch(m.step.number)
        report = self.report()
        m.views.on_report(m.me, report)
        m.out.send_all(m.views.others, report)

    def report(self) -> Report:
        """Return this member's report: the state, gradients and open work that it has."""
        m, runs = self._machine, self._machine.step.runs
        holdings, known = m.custody.holdings, m.custody.repair.known()
        return Report(
            committed=m.commit.step,
            record=m.commit.record,
            base=m.commit.roles.committed,
            parameters=tuple(m.commit.parameters.versions),
            held=tuple((shard, holdings[shard].version, self._gradients_of(shard)) for shard in holdings),
            begun=m.loop.step,
            finishing=m.end.step is not None,
            work=m.step.tasks.open_work(m.replicas.adopted, m.replicas.present),
            own=tuple(tuple(sorted(partials.nodes)) for partials in runs.own),
            folded=m.step.reduction.folded(),
            wrong=None if known is None else Wrong(parameters=known, accused=m.step.audits.accused),
            keeps_own=m.end.step is not None and m.end.keeps_own,
        )

    def _gradients_of(self, shard: int) -> tuple[int, ...]:
        """Return the steps whose finished gradient is here, kept as a backup or folded as the primary."""
        step = self._machine.step
        folded = {step.number} if shard in step.reduction.finished else set()
        return tuple(sorted({*self._machine.custody.holdings[shard].kept, *folded}))

    def decide(self) -> Recovery | None:
        """Return the decision that follows from all reports, the same on all members. None if this member ends."""
        m = self._machine
        decision = decide(m.views.view, m.views.reports, m.shape)
        if isinstance(decision, Recovery):
            return decision
        # When the work is done, a state without holders is no loss.
        if m.end.step is not None and self._may_leave_without_state():
            m.end.let_go()
        else:
            m.out.fail("StateLostError", decision.reason)
        return None

    def _may_leave_without_state(self) -> bool:
        """Return True if the job is at its end and all parameters are here.

        Members that left took their shards along.
        """
        reports = self._machine.views.reports.values()
        # Rank 0 always takes all blocks, so at least one member has them all.
        return all(r.finishing and (r.keeps_own or set(r.parameters) == {r.committed}) for r in reports)

    def complete(self, decision: Recovery) -> None:
        """Finish apply and publish of the highest committed step, and repeat messages that may not have arrived."""
        m = self._machine
        m.out.do(p.Decided(step=m.step.number))
        m.replicas.hear(m.views.reports)
        if m.commit.step < decision.committed:
            if m.commit.roles.committed is not None and decision.record is not None:
                self._committing.pass_step(decision.record)
            else:
                self.arrive(decision)
        # The goal depends on the present members only, and not on the last goal. Members that come and go leave no
        # trace in it.
        m.commit.roles.settle(decision.base, decision.now)
        self._committing.moving.aim()
        m.custody.given.plan()
        # This comes before the open step goes on: adopted blocks are published together with all other missing
        # parameters.
        rerouting = self._reroute(decision)
        m.replicas.recover(m.views.reports, {} if rerouting is None else rerouting.adopted, decision.committed)
        self._distrust(decision)
        self._take_up_roles(decision)
        self._publish_lacking(decision)
        self._announce(decision)

    def arrive(self, decision: Recovery) -> None:
        """Take over the committed step of the other members, as a newcomer."""
        m = self._machine
        m.commit.advance(decision.committed, decision.record)
        # No member needs what this one had of an older step.
        m.begin(decision.committed + 1)

    def _distrust(self, decision: Recovery) -> None:
        """Take distrusted parameters again from a holder of the state, on all members.

        Some member has computed with wrong ones.
        """
        m = self._machine
        for shard in decision.distrusted:
            m.commit.parameters.lose(shard)
            held = m.custody.holdings.find(shard)
            # A member that published them wrongly has dropped its state. A difference from that state is settled.
            if held is not None and m.commit.roles.is_mine(shard):
                held.settle()

    def _take_up_roles(self, decision: Recovery) -> None:
        m = self._machine
        holdings, roles = m.custody.holdings, m.commit.roles
        # Copies of an interrupted rebalancing are dropped, too: no member knows if they are complete.
        for shard in holdings:
            if m.me not in roles.live[shard].all:
                holdings.drop(shard)
        holdings.unbind(holdings.bound - set(roles.mine))  # before the first commit, holders may change places
        for shard in roles.mine:
            m.custody.primaries.take_over(shard, decision.record)

    def _publish_lacking(self, decision: Recovery) -> None:
        m = self._machine
        if not m.commit.is_initial:
            mine = set(m.commit.roles.mine)
            wanted = {m: tuple(s for s in lacking if s in mine) for m, lacking in decision.lacking.items()}
            self._committing.publish(m.custody.primaries.hold_back(wanted), decision.record)
        elif m.me == decision.source:
            m.commit.parameters.have_initial()
            self._committing.publish(decision.lacking, None)

    def _announce(self, decision: Recovery) -> None:
        m = self._machine
        if not m.commit.is_initial:
            # The living primaries announce, since the one that announced before may be lost. They announce all their
            # shards, so that a new primary also checks what it has verified.
            mine = m.commit.roles.mine
            m.custody.digest_broadcast.announce(mine, mine, m.commit.roles.live)

    def resume(self, decision: Recovery) -> None:
        """Resume the open step: partials of survivors stay valid, and only missing work is computed again."""
        m = self._machine
        if decision.wrong is not None:
            self._begin_anew()
        rerouting = self._hand_out(decision)
        m.step.reduction.take_over(m.custody.backups.kept(m.commit.roles.mine))
        m.out.do(self._resumed(decision, rerouting))
        # The order matters: doubts are asked again before the repair looks for new faults.
        for part in m.parts:
            part.resume(decision)
        if rerouting is not None:
            m.step.tasks.send_again(rerouting)
        m.custody.repair.convict(m.step.audits.hear(accused(m.views.reports)))

    def _reroute(self, decision: Recovery) -> Rerouting | None:
        """Return the rerouting of a step in pipelines, the same on all members. None if whole runs are computed."""
        m = self._machine
        plan = open_plan(decision, m.views.reports, m.commit.plan_of(decision.record))
        reports = {member: m.views.reports[member] for member in m.views.view.ids}
        return None if plan is None else reroute(reports, m.shape, decision, plan)

    def _hand_out(self, decision: Recovery) -> Rerouting | None:
        m = self._machine
        plan, rerouting = (
            open_plan(decision, m.views.reports, m.commit.plan_of(decision.record)),
            self._reroute(decision),
        )
        m.step.tracing.take_up(m.views.reports, plan)
        if plan is not None and rerouting is not None:
            m.step.tasks.take_up(plan, rerouting)
        if m.shape.pipelining is not None:
            return rerouting
        m.step.runs.hand(decision.runs[m.me])
        if decision.redone == m.shape.runs:  # no member has begun
            m.step.check.plan(decision.runs, decision.newcomers)
            m.step.audits.plan(decision.runs, is_anew=decision.wrong is not None)
        else:
            m.step.audits.hand(decision.runs)
        return None

    def plan_first(self) -> bool:
        """Hand out the job's first step by its plan, once all have traced. Returns True if this call did."""
        m = self._machine
        if m.views.is_recovering or not m.step.tracing.awaits_plan:
            return False
        plan = m.step.tracing.agree(m.shape.runs)
        if plan is None:
            return False
        # It starts from the reports that all members have. A member that knew the plan may be lost, and its gradients
        # may be here.
        decision = decide(m.views.view, m.views.reports, m.shape)
        assert isinstance(decision, Recovery)
        known = {member: m.views.reports[member] for member in m.views.view.ids}
        reports = {name: replace(r, work=replace(r.work, traced=m.step.tracing.traced)) for name, r in known.items()}
        m.step.tasks.take_up(plan, reroute(reports, m.shape, decision, plan))
        return True

    def _begin_anew(self) -> None:
        """Begin the open step anew. All members have reported, so none still reads another member's data of it."""
        m = self._machine
        m.step.begin_attempt(m.step.number)
        m.custody.holdings.void_step(m.step.number)
        m.out.do(p.VoidAttempt(step=m.step.number))

    def _resumed(self, decision: Recovery, rerouting: Rerouting | None) -> p.Resumed:
        m = self._machine
        return p.Resumed(
            view=m.views.view,
            recovery=decision,
            target=m.commit.roles.target,
            own=frozenset(node for partials in m.step.runs.own for node in partials.nodes),
            is_checking=m.step.check.left > 0 or bool(m.step.audits.left()),
            rerouting=rerouting,
        )
