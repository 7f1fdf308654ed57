"""Vote, commit, apply, publish: how a step becomes one that cannot be undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from elastrain import protocol as p
from elastrain.decisions.voting import Disagreement, Dispute, combine_votes
from elastrain.job.placement import Holders, Placement, next_roles, target
from elastrain.job.run_plan import plan
from elastrain.job.values import Record, Vote
from elastrain.member.contract import MemberPart, handles
from elastrain.member.parts import Machine
from elastrain.protocol.messages import Ack, Publish


class Committing(MemberPart):
    """Rules of the commit, over the parts; owns nothing."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    # ------------------------------------------------------------------------------------------------ vote and commit

    def why_not_yet(self) -> str:
        """Return the first reason for which this member does not vote yet; empty if it may vote, or has."""
        m = self._machine
        if m.step.ballot.has_voted:
            return ""
        if reason := next(filter(None, (part.why_not_yet() for part in m.parts)), ""):
            return reason
        unsafe = next((shard for shard in m.commit.roles.mine if not self.is_safe(shard)), None)
        return "" if unsafe is None else f"the gradient of shard {unsafe} is not finished, or not on all its backups"

    @handles(Ack)
    def on_ack(self, source: str, message: Ack) -> None:
        """Note that a member keeps gradients of this member's shards."""
        if message.step == self._machine.step.number:
            self._machine.step.ballot.acknowledge(source, message.shards)

    @handles(Vote)
    def on_vote(self, source: str, message: Vote) -> None:
        """Note a member's vote on the open step."""
        if message.step == self._machine.step.number:
            self._machine.step.ballot.add(source, message)

    def is_safe(self, shard: int) -> bool:
        """Whether the shard's gradient is finished, and all members with a copy of the shard have acknowledged it."""
        m = self._machine
        # After the vote this member may be lost at any moment: what the record says must be possible without it.
        return (
            shard in m.step.reduction.finished
            and m.custody.holdings.has(shard, m.commit.step)
            and m.commit.roles.readers(shard) <= m.step.ballot.acknowledged(shard)
        )

    def is_settled(self) -> bool:
        """Whether the last step's parameters and copies are compared: after the end nobody would notice a fault."""
        m, custody = self._machine, self._machine.custody
        if m.views.is_recovering or m.commit.is_initial or not m.views.others:
            return not m.views.is_recovering
        # In every other step the next one's votes see to this; after the last there is none.
        backed = [shard for shard, holders in enumerate(m.commit.roles.live) if m.me in holders.backups]
        return (
            custody.comparison.is_settled()
            and not custody.repair.is_due
            and not custody.announcements.is_digesting
            and not custody.holdings.in_doubt()
            and all(custody.holdings.has(shard, m.commit.step) for shard in backed)
        )

    def vote(self) -> bool:
        """Vote once the gradients of this member's shards are finished and backed up. Returns True if it has voted."""
        m = self._machine
        if m.step.ballot.has_voted or self.why_not_yet():
            return False
        assert m.views.newest is not None
        mine, finished = m.commit.roles.mine, m.step.reduction.finished
        vote = Vote(
            step=m.step.number,
            seen=m.views.newest.generation,
            contribution=finished[mine[0]].contribution if mine else None,
            square_norms=tuple((shard, finished[shard].square_norm) for shard in mine),
            roles=tuple(self.proposed_roles(mine)),
            settings=m.loop.settings,
            checks=(*m.step.check.results(), *m.step.audits.results()),
            before=m.step.audits.told_before(),
            checkpoint=m.checkpointing.wish(m.step.number),
            writing=m.checkpointing.open is not None,
            graph=m.step.tracing.traced.graph.digest() if m.step.tracing.traced is not None else "",
            plan=m.step.tasks.propose(),
        )
        m.step.audits.tell(vote.checks)
        m.step.ballot.cast(m.me, vote)
        m.out.send_all(m.views.others, vote)
        return True

    def proposed_roles(self, mine: Iterable[int]) -> Iterable[tuple[int, Holders]]:
        """Changes in the holders of this primary's shards: members whose copies are verified become holders."""
        roles, ballot = self._machine.commit.roles, self._machine.step.ballot
        assert roles.committed is not None
        # An acknowledgement says that the member has the gradient and the verified state before it: it can answer.
        for shard in mine:
            ready = {self._machine.me, *ballot.acknowledged(shard)}
            after = next_roles(roles.live[shard], roles.target[shard], ready)
            # A holder whose state was wrong lives, and holds nothing in this view: to take it back is a change, too.
            if not after == roles.live[shard] == roles.committed[shard]:
                yield shard, after

    def decide(self) -> tuple[Record | None, bool]:
        """Return the record of the open step if all votes are here, and whether the votes have changed anything.

        All members come to the same record. There is none where the votes disagree, or where the store has to know of
        the first commit before it is made.
        """
        m = self._machine
        if m.views.current is None or m.views.is_recovering:
            return None, False
        votes = m.step.ballot.votes(m.views.current.ids)
        if votes is None:
            return None, False
        scaler, plan_now = m.commit.next_scaler(), m.commit.plan
        found = combine_votes(m.step.number, m.views.current, votes, shape=m.shape, scaler=scaler, plan=plan_now)
        # All members come to the same disagreement, too, so that none goes on alone.
        if isinstance(found, Disagreement):
            m.out.fail("DivergedError", found.reason)
        elif isinstance(found, Dispute):
            self._settle(found)
        elif m.commit.is_initial and not m.views.may_commit:  # others could begin anew beside what is committed here
            return None, m.views.ask_to_commit()
        return (found if isinstance(found, Record) else None), True

    def _settle(self, dispute: Dispute) -> None:
        """An audit has found a difference: the step begins anew, and the votes of this attempt are void."""
        m = self._machine
        m.step.ballot.clear()
        m.step.audits.accused = dispute.accused  # for the next report: not all may have got these votes
        # All members come to this by the same votes, and each asks for the view, since the others may die: one tells.
        reason = "; ".join((dispute.reason, *dict.fromkeys(each.reason for each in dispute.accused)))
        m.custody.repair.begin_anew(reason, tells=m.views.view.ids[0] == m.me)

    # ----------------------------------------------------------------------------------------------------------- pass

    def learn(self, record: Record) -> None:
        """Hold the record: the step cannot be undone any more."""
        m = self._machine
        m.commit.advance(record.step, record)
        m.custody.repair.convict(m.step.audits.hear(record.findings.accused))
        m.out.do(p.Passed(record=record))

    def pass_step(self, record: Record) -> tuple[Sequence[int], Placement]:
        """Do this member's part in the commit; the shards that it updated, and who held what until now."""
        m = self._machine
        roles = m.commit.roles
        mine, before = roles.mine, roles.live
        m.checkpointing.capture()
        # Taken before the record is held: with it the open step, and all that is finished of it, is forgotten.
        touched = {shard: m.step.reduction.finished[shard].touched for shard in mine}
        plan_before = m.commit.plan
        self.learn(record)
        m.custody.primaries.apply(record, touched)
        m.custody.lone.note(mine)
        m.custody.backups.apply_behind(record)
        self.change_roles(record, before)
        m.replicas.pass_commit(before)
        if record.plan != plan_before:
            # Holders follow the blocks: who computes with a shard can answer for it without any memory more.
            m.commit.roles.target = self.goal(m.commit.roles.live)
            m.custody.given.plan()
        m.checkpointing.on_passed(record, before)
        m.out.do(p.EndAttempt(step=record.step))
        m.begin(record.step + 1)
        return mine, before

    def goal(self, now: Placement) -> Placement:
        """Where the shards should be in this view, by who is there and by the plan."""
        m = self._machine
        return target(now, m.shape.sizes, m.views.view.nodes, m.shape.backups, m.replicas.homes())

    def change_roles(self, record: Record, before: Placement) -> None:
        # The only place where holders change: all members carry out the same record.
        m = self._machine
        roles = m.commit.roles
        roles.change(record.roles)
        for shard, holders in record.roles:
            m.custody.holdings.change_role(m.me, shard, before[shard], holders)
            roles.unfollow(shard, holders.all)
        # A role that has moved may make a copy needless, or another one due.
        if record.roles:
            m.custody.given.plan()

    def open_next(self, record: Record, mine: Sequence[int], before: Placement) -> None:
        """Hand out the next step, and publish what this member has updated."""
        m = self._machine
        if record.plan is not None:
            m.step.tasks.hand_out(record.plan)
        else:
            self._hand_out_runs()
        self.publish(dict.fromkeys(m.views.others, tuple(mine)), record)
        m.custody.announcements.announce(mine, mine, before)

    def _hand_out_runs(self) -> None:
        # Every member computes the whole plan alike, and takes its own runs: no member has to hand them out.
        m = self._machine
        runs = plan(m.views.view.ids, m.shape.runs, m.views.view.quotas)
        m.step.runs.hand(runs[m.me])
        m.step.check.plan(runs)
        m.step.audits.plan(runs)

    # -------------------------------------------------------------------------------------------------------- publish

    def publish(self, shards_by_member: Mapping[str, Sequence[int]], record: Record | None) -> None:
        """Send new parameters to those who compute with them.

        Every publish carries the record: whoever receives it has passed.
        """
        m = self._machine
        for member, shards in shards_by_member.items():
            wanted = m.replicas.wanted(member, shards)
            if wanted and member != m.me:
                m.out.send(member, Publish(step=m.commit.step, record=record, shards=wanted))

    def publish_looked(self) -> bool:
        """Publish parameters that were held back until this member had verified the state that it took over."""
        m = self._machine
        # No wrong parameters are shown to any script for a moment, although the step would begin anew then.
        wanted = m.custody.primaries.looked()
        self.publish(wanted or {}, m.commit.record)
        return wanted is not None

    def take_parameters(self, message: Publish, payload: object) -> None:
        m = self._machine
        if message.step != m.commit.step:
            return  # parameters of a step never overwrite older ones before its record is held
        # Of its own shards this member has the parameters in the model itself: they are what others get.
        for index, shard in enumerate(message.shards):
            if shard not in m.custody.holdings.bound:
                m.out.do(p.TakeParameters(step=message.step, shard=shard, payload=payload, index=index))
                m.commit.parameters.have(shard)
