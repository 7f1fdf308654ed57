"""Vote, commit, pass, apply, publish: how a step becomes one that cannot be undone."""

from __future__ import annotations

from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.checking import Checking
from elastrain.messages import Publish
from elastrain.placement import Holders, next_roles
from elastrain.plan import plan
from elastrain.values import Record, Vote
from elastrain.voting import Disagreement, combine_votes


class Committing(Checking):
    """The part of the protocol that commits."""

    def _switch(self) -> None:
        """Go on to the newest view."""
        raise NotImplementedError

    def _replay_later(self) -> None:
        """Take in what had come too early."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ vote and commit

    def _vote(self) -> None:
        attempt = self.attempt
        if attempt.voted or not self._may_vote():
            return
        assert self.newest is not None
        mine = self._mine()
        vote = Vote(
            step=attempt.step,
            seen=self.newest.generation,
            contribution=attempt.finished[mine[0]].contribution if mine else None,
            square_norms=tuple((s, attempt.finished[s].square_norm) for s in mine),
            roles=tuple(self._proposed_roles(mine)),
            settings=self._settings,
            checks=tuple(check for _, check in sorted(attempt.checks.items())),
        )
        attempt.voted = True
        attempt.votes[self.me] = vote
        for member in self._others:
            self._send(member, vote)

    def _may_vote(self) -> bool:
        attempt = self.attempt
        return (
            not self.recovering
            and self.begun == attempt.step
            and self._asked == attempt.step  # a script may still read what the commit of this step overwrites
            and not self._digesting
            and not self._copying
            and self._has_copied()
            and self._parameters_are_here()
            and self._is_checked()
            and self._is_compared()
            and not self._is_in_doubt()
            and all(self._is_safe(shard) for shard in self._mine())
        )

    def _is_safe(self, shard: int) -> bool:
        """Finished, on state of the step before, and acknowledged by all who keep a copy or are about to."""
        attempt, holders = self.attempt, self.now[shard]
        waiting_for = {*holders.backups, *self._followers[shard]}
        return (
            shard in attempt.finished
            and self.held[shard].version == self.committed
            and waiting_for <= attempt.acks.get(shard, set())
        )

    def _proposed_roles(self, mine: Iterable[int]) -> Iterable[tuple[int, Holders]]:
        assert self.base is not None
        for shard in mine:
            ready = {self.me, *self.attempt.acks.get(shard, set())}
            after = next_roles(self.now[shard], self.goal[shard], ready)
            if after != self.base[shard]:
                yield shard, after

    def _commit(self) -> None:
        attempt, view = self.attempt, self.view
        if view is None or self.recovering or not set(attempt.votes) >= set(view.ids):
            return
        votes = [attempt.votes[m] for m in view.ids]
        record = combine_votes(
            attempt.step,
            view,
            votes,
            rule=self.shape.loss_scale,
            scaler=self._scaler(),
            deterministic=self.shape.deterministic,
            blocks=self.shape.block_names,
        )
        if isinstance(record, Disagreement):
            self._fail("DivergedError", record.reason)
        else:
            self._pass(record)

    # ----------------------------------------------------------------------------------------- pass, apply and publish

    def _pass(self, record: Record) -> None:
        """This member holds the record: the step can not be undone any more."""
        mine = self._mine()
        before = self.now
        touched = {s: self.attempt.finished[s].touched for s in mine}
        self._learn(record)
        if mine:
            self._do(p.Apply(record=record, shards=tuple(mine), touched=touched))
        for shard in mine:
            self._applied(shard)
        self._apply_behind(record, set(mine))
        self._change_roles(record, before)
        self._do(p.EndAttempt(step=record.step))
        self.attempt = self._new_attempt(record.step + 1)
        if record.switch and not self.recovering:
            self._switch()
        elif not self.recovering:
            assert self.view is not None
            runs = plan(self.view.ids, self.shape.runs)
            self.attempt.hand(runs[self.me])
            self._plan_checks(runs)
            self._publish(dict.fromkeys(self._others, tuple(mine)), record)
            self._compute_digests(mine, mine, before)
            self._replay_later()

    def _learn(self, record: Record) -> None:
        self.record = record
        self.committed = record.step
        self._missing = None
        self._copied_bytes = 0
        self._told.clear()
        self._broken.clear()
        self._forget_comparison()
        self._do(p.Passed(record=record))

    def _applied(self, shard: int) -> None:
        held = self.held[shard]
        if held.difference is not None:
            self._end_in_doubt(shard)
        held.version, held.digest, held.is_copy = self.committed, None, False
        held.kept = {step: kept for step, kept in held.kept.items() if step > self.committed}
        held.scratch.clear()
        held.expected.clear()
        self.bound.add(shard)
        self._have_parameters(shard)

    def _apply_behind(self, record: Record, mine: set[int]) -> None:
        for shard in sorted(set(self.held) - mine):
            held = self.held[shard]
            if record.step in held.kept:
                touched = held.kept[record.step].touched
                self._do(p.ApplyBehind(record=record, shard=shard, touched=touched))
            else:  # a copy that was not followed up is stale from now on
                self._drop(shard)

    def _change_roles(self, record: Record, before: tuple[Holders, ...]) -> None:
        assert self.base is not None
        base, now = list(self.base), list(self.now)
        for shard, holders in record.roles:
            base[shard] = now[shard] = holders
        self.base, self.now = tuple(base), tuple(now)
        for shard, holders in record.roles:
            if self.me == before[shard].primary != holders.primary and self.me in holders.backups:
                self.bound.discard(shard)
                self._do(p.Unbind(shard=shard))
            if self.me in before[shard].all and self.me not in holders.all:  # a follower's time is still to come
                self._dropping.add(shard)
            self._followers[shard] -= set(holders.all)
        if record.roles:
            self._plan_copies()

    def _publish(self, shards_by_member: dict[str, tuple[int, ...]], record: Record | None) -> None:
        """Every publish carries the record: whoever receives it has passed."""
        for member, shards in shards_by_member.items():
            if shards and member != self.me:
                self._send(member, Publish(step=self.committed, record=record, shards=shards))

    def _on_publish(self, message: Publish, payload: object) -> None:
        if message.record is not None and message.step == self.committed + 1:
            self._pass(message.record)
        if self._may_take(message):
            for index, shard in enumerate(message.shards):
                if shard not in self.bound:
                    self._do(p.TakeParameters(step=message.step, shard=shard, payload=payload, index=index))
                    self._have_parameters(shard)

    def _may_take(self, message: Publish) -> bool:
        """Parameters of a step never overwrite older ones before its record is held."""
        return message.step == self.committed
