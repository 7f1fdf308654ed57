"""Rules for voting on a step, committing, applying and publishing it. A committed step cannot be undone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from elastrain import protocol as p
from elastrain.decisions.voting import Disagreement, Dispute, combine_votes
from elastrain.job.checkpoint_plan import CheckpointVote
from elastrain.job.placement import Holders, Placement, next_roles
from elastrain.job.run_plan import plan
from elastrain.job.values import Record, Vote
from elastrain.member.contract import MemberPart, handles
from elastrain.member.parts import Machine
from elastrain.member.pipeline.moving_shards import MovingShards
from elastrain.protocol.evaluation_messages import BlocksAdopted
from elastrain.protocol.messages import Ack, Publish


class Committing(MemberPart):
    """Rules of the commit. They act on all parts and own no data."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.moving = MovingShards(machine)

    def progress(self) -> bool:
        """Publish parameters that were held back, compare those of the step, or vote. Returns True if it did."""
        return self.publish_looked() or self.compare() or self.vote()

    # ------------------------------------------------------------------------------------------------ vote and commit

    def why_not_yet(self) -> str:
        """Return the first reason why this member may not vote yet, or "" if it may vote or has voted."""
        m = self._machine
        if m.step.ballot.has_voted:
            return ""
        unsafe = (self.why_unsafe(shard) for shard in m.commit.roles.mine)
        return next(filter(None, chain((part.why_not_yet() for part in m.parts), unsafe)), "")

    def why_unsafe(self, shard: int) -> str:
        """Return why a record with this shard could not be carried out without this member, or "" if it could."""
        m = self._machine
        # After its vote this member may be lost at any moment.
        if shard not in m.step.reduction.finished:
            return m.step.reduction.why_unfinished(shard)
        if not m.custody.holdings.has(shard, m.commit.step):
            return f"the state of shard {shard} after step {m.commit.step} is not here"
        missing = m.commit.roles.readers(shard) - m.step.ballot.acknowledged(shard)
        return (
            f"{', '.join(sorted(missing))} did not report yet to keep the gradient of shard {shard}" if missing else ""
        )

    def missing_votes(self) -> str:
        """Return whose votes on the open step are missing, or "" if none is."""
        missing = self._machine.step.ballot.missing(self._machine.views.others)
        return f"no vote of {', '.join(missing)} yet" if missing else ""

    @handles(Ack)
    def on_ack(self, source: str, message: Ack) -> None:
        """Note that a member has stored gradients of this member's shards."""
        if message.step == self._machine.step.number:
            self._machine.step.ballot.acknowledge(source, message.shards)

    @handles(Vote)
    def on_vote(self, source: str, message: Vote) -> None:
        """Note a member's vote on the open step."""
        self._machine.step.proposals.hear(source, message)
        if message.step == self._machine.step.number:
            self._machine.step.ballot.add(source, message)

    def is_settled(self) -> bool:
        """Return True once the last step's parameters and copies are compared.

        After the end no member could notice a fault.
        """
        m, custody = self._machine, self._machine.custody
        if m.views.is_recovering or m.commit.is_initial or not m.views.others:
            return not m.views.is_recovering
        # Before every other step's commit the vote checks this; after the last step there is no vote.
        backed = [shard for shard, holders in enumerate(m.commit.roles.live) if m.me in holders.backups]
        return (
            custody.comparison.is_settled()
            and not custody.repair.is_due
            and not custody.digest_broadcast.is_digesting
            and not custody.holdings.in_doubt()
            and all(custody.holdings.has(shard, m.commit.step) for shard in backed)
        )

    def compare(self) -> bool:
        """Compare parameters once this member has computed all its work of a step. Returns True if it did anything."""
        m, custody = self._machine, self._machine.custody
        # An earlier comparison would miss parameters that change before the last run is computed.
        has_computed = m.loop.step == m.step.number and (m.end.step is not None or m.step.is_done())
        # What is computed anew is compared then.
        if custody.repair.is_due or m.views.is_recovering or not has_computed:
            return False
        has_looked = custody.sole_copies.look_again()
        return (custody.comparison.may_compare() and custody.comparison.go_on()) or has_looked

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
            checkpoint=CheckpointVote(m.checkpointing.wish(m.step.number), m.checkpointing.open is not None),
            graph=m.step.tracing.traced.graph.digest() if m.step.tracing.traced is not None else "",
            plan=self.moving.vote(),
            marks=tuple(m.step.runs.marks.values()),
        )
        m.step.audits.tell(vote.checks)
        m.step.ballot.cast(m.me, vote)
        m.out.send_all(m.views.others, vote)
        return True

    def proposed_roles(self, mine: Iterable[int]) -> Iterable[tuple[int, Holders]]:
        """Yield changes in the holders of this primary's shards: members with verified copies become holders."""
        roles, ballot = self._machine.commit.roles, self._machine.step.ballot
        assert roles.committed is not None
        # A member that has acknowledged has the gradient and the verified state before it, so it can make the update.
        for shard in mine:
            ready = {self._machine.me, *ballot.acknowledged(shard)}
            after = next_roles(roles.live[shard], roles.goal(shard), ready)
            # A member whose wrong state was dropped is alive, but no holder in this view. To make it a holder again is
            # a change, too.
            if not after == roles.live[shard] == roles.committed[shard]:
                yield shard, after

    def decide(self) -> tuple[Record | None, bool]:
        """Return the record of the open step if all votes are here, and True if the votes have changed anything.

        All members come to the same record. There is no record if the votes disagree, or while the store does not know
        yet that the job's first commit is due.
        """
        m = self._machine
        if m.views.current is None or m.views.is_recovering:
            return None, False
        votes = m.step.ballot.votes(m.views.current.ids)
        if votes is None:
            return None, False
        found = combine_votes(m.step.number, m.views.current, votes, shape=m.shape, now=m.commit.in_force())
        # All members find the same disagreement, so none of them goes on alone.
        if isinstance(found, Disagreement):
            m.out.fail("DivergedError", found.reason)
        elif isinstance(found, Dispute):
            self._settle(found)
        elif m.commit.is_initial and not m.views.may_commit:  # others could begin anew beside what is committed here
            return None, m.views.ask_to_commit()
        return (found if isinstance(found, Record) else None), True

    def _settle(self, dispute: Dispute) -> None:
        """Begin the step anew, because an audit has found a difference. The votes of this attempt are void."""
        m = self._machine
        m.step.ballot.clear()
        m.step.audits.accuse(dispute.accused)
        # All members find this in the same votes. Each asks for a new view, since others may die, but only one reports
        # it.
        reason = "; ".join((dispute.reason, *dict.fromkeys(each.reason for each in dispute.accused)))
        m.custody.repair.begin_anew(reason, tells=m.views.view.ids[0] == m.me)

    # ----------------------------------------------------------------------------------------------------------- pass

    def learn(self, record: Record) -> None:
        """Store the commit record. From here on the step cannot be undone."""
        m = self._machine
        m.commit.advance(record.step, record)
        m.custody.repair.convict(m.step.audits.hear(record.findings.accused))
        m.out.do(p.Passed(record=record))

    def pass_step(self, record: Record) -> tuple[Sequence[int], Placement]:
        """Carry the commit out on this member.

        Returns the shards that it updated, and the holders before the commit.
        """
        m = self._machine
        roles = m.commit.roles
        mine, before = roles.mine, roles.live
        m.checkpointing.progress()  # captures the states that are about to change
        # This is read first, because `learn` forgets the open step and its finished gradients.
        touched = {shard: m.step.reduction.finished[shard].touched for shard in mine}
        plan_before = m.commit.plan
        self.learn(record)
        m.custody.primaries.apply(record, touched)
        m.custody.sole_copies.note(mine)
        m.custody.backups.apply_behind(record)
        roles.take(record.roles)
        self.change_roles(record, before)
        m.replicas.pass_commit(before)
        # After the blocks have memory: the updates go into the model.
        m.custody.backups.take_over(record, [shard for shard, taker in roles.taken.items() if taker == m.me])
        if m.commit.plan != plan_before:
            self.moving.tell_move(record.step, plan_before)
            # Holders follow the blocks: a member that computes with a shard can hold it without more memory for
            # parameters.
            self.moving.aim()
            m.custody.given.plan()
        m.checkpointing.on_passed(record, before)
        m.out.do(p.EndAttempt(step=record.step))
        m.begin(record.step + 1)
        return mine, before

    def change_roles(self, record: Record, before: Placement) -> None:
        """Change the holders of shards as the commit record says."""
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
        """Hand out the runs or tasks of the next step, and publish the shards that this member has updated."""
        m = self._machine
        if m.commit.plan is not None:
            m.step.tasks.hand_out(m.commit.plan)
        else:
            self._hand_out_runs()
        # Over a slow link the publish of a block takes as long as many micro-batches.
        taken = m.commit.roles.taken
        self.publish({peer: [s for s in mine if taken.get(s) != peer] for peer in m.views.others}, record)
        m.shadow_feed.feed(mine)
        m.custody.digest_broadcast.announce(mine, mine, before)

    def _hand_out_runs(self) -> None:
        # Every member computes the whole plan alike, and takes its own runs: no member has to hand them out.
        m = self._machine
        runs = plan(m.views.view.ids, m.shape.runs, m.commit.in_force().speeds)
        m.step.runs.hand(runs[m.me])
        m.step.check.plan(runs)
        m.step.audits.plan(runs)

    # -------------------------------------------------------------------------------------------------------- publish

    def publish(self, shards_by_member: Mapping[str, Sequence[int]], record: Record | None) -> None:
        """Send new parameters to the members that compute with them.

        Every publish carries the commit record, so a receiver has passed the step, too.
        """
        m = self._machine
        for member, shards in shards_by_member.items():
            wanted = m.replicas.wanted(member, shards)
            if wanted and member != m.me:
                m.out.send(member, Publish(step=m.commit.step, record=record, shards=wanted))

    def publish_looked(self) -> bool:
        """Publish parameters that were held back until this member had verified the state that it took over.

        Returns True if there were any.
        """
        m = self._machine
        # Wrong parameters must not be visible to any script, even if the step begins anew afterwards.
        wanted = m.custody.primaries.looked()
        self.publish(wanted or {}, m.commit.record)
        return wanted is not None

    @handles(BlocksAdopted)
    def on_adopted(self, source: str, message: BlocksAdopted) -> None:
        """Publish what a member needs that has adopted blocks for an evaluation."""
        m = self._machine
        if message.name.after == m.commit.step:
            # Whoever has published them before: a new primary may still wait for them itself.
            wanted = {source: [s for s in m.replicas.adopt(source, message.places) if s in m.replicas.lent]}
            self.publish(m.custody.primaries.hold_back(wanted), m.commit.record)

    def take_parameters(self, message: Publish, payload: object) -> None:
        """Take published parameters into the model, except for shards that already work on the model's memory."""
        m = self._machine
        if message.step != m.commit.step:
            return  # parameters of a step never overwrite older ones before its record is held
        # The parameters of this member's own shards already lie in the model. They are the ones that others get.
        for index, shard in enumerate(message.shards):
            if shard not in m.custody.holdings.bound:
                m.out.do(p.TakeParameters(step=message.step, shard=shard, payload=payload, index=index))
                m.commit.parameters.have(shard)
