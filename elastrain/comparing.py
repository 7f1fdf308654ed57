"""Compare what must be equal: states with their backups' copies, parameters with what was published; find who is wrong.

A difference is a doubt first: a backup looks again at what it has, then asks the others. Parameters are compared when
a member has computed its last run of a step and before it votes for it, so that nothing computed with wrong ones is
ever committed. The verdicts are in witness.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastrain import protocol as p
from elastrain.fold import is_covered
from elastrain.messages import Digests, Doubt, Evidence
from elastrain.placement import Holders
from elastrain.reduction import Reduction
from elastrain.standing import HeldShard
from elastrain.witness import Difference, Ends, Verdict, judge, judge_copy, judge_parameters, look_again, other_primary


class Comparing(Reduction):
    """The part of the protocol that compares."""

    def _verify(self, shard: int, step: int) -> None:
        """Swap a backup's update in if it is the primary's."""
        raise NotImplementedError

    def _drop_given_away(self) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------ what is told

    def _compute_digests(self, states: Iterable[int], published: Iterable[int], before: tuple[Holders, ...]) -> None:
        """Tell backups what the states are worth, and everybody what was published."""
        wanted = tuple(s for s in states if self._compares_with(s, before))
        told = tuple(published) if self._others else ()
        if wanted or told:
            self._digesting = True
            self._do(p.ComputeDigests(step=self.committed, shards=wanted, published=told))
        else:
            self._drop_given_away()

    def _compares_with(self, shard: int, before: tuple[Holders, ...]) -> set[str]:
        """Who compares its copy of this shard with ours."""
        members = {*before[shard].all, *self.now[shard].all, *self._followers[shard]}
        return members & set(self._others)

    def _on_digested(self, event: p.StatesDigested) -> None:
        self._digesting = False
        if event.step != self.committed or self.recovering:
            return
        for shard, digest in event.digests.items():
            if shard in self.held and self.held[shard].version == event.step:
                self.held[shard].digest = digest
        self._told.update({shard: (self.me, digest) for shard, digest in event.published.items()})
        message = Digests(
            step=event.step,
            digests=tuple(sorted(event.digests.items())),
            parameters=tuple(sorted(event.published.items())),
        )
        for member in self._others:
            self._send(member, message)
        self._drop_given_away()

    def _on_digests(self, source: str, message: Digests) -> None:
        if message.step == self.committed:
            self._told.update({shard: (source, digest) for shard, digest in message.parameters})
        for shard, digest in message.digests:
            held = self.held.get(shard)
            if held is not None and shard not in self.bound and held.version < message.step:
                held.expected[message.step] = digest
                held.primary = source
                self._verify(shard, message.step)

    # -------------------------------------------------------------------------------------------------- parameters

    def _forget_comparison(self) -> None:
        """Other parameters, or more to compute with them: what was found says nothing any more."""
        self._turn += 1
        self._found = None
        self._compared = False

    def _compare_parameters(self) -> None:
        """Once this member has computed all that it has to in a step: what has it computed with?"""
        if self._compared or not self._may_compare():
            return
        if self._verdict is not None and len(self._told) < len(self.shape.shards):
            return
        if self._found is None:
            if self._asked_turn != self._turn:
                self._asked_turn = self._turn
                self._do(p.DigestParameters(turn=self._turn))
        elif len(self._told) == len(self.shape.shards):
            self._compare(self._found)

    def _may_compare(self) -> bool:
        if self.recovering or not self._others or not self._parameters_are_here():
            return False
        computed = self._finishing is not None or self._has_computed()
        return self._verdict is not None or (self.begun == self.attempt.step and computed)

    def _has_computed(self) -> bool:
        """Every block of all that it has to compute in this step."""
        runs = [(run, run + 1) for run in self.attempt.pending]
        return all(is_covered(run, own.nodes) for own in self.attempt.own for run in runs)

    def _compare(self, found: dict[int, int]) -> None:
        wrong = next((s for s, (_, digest) in sorted(self._told.items()) if found[s] != digest), None)
        if wrong is None:
            self._compared = True
            self._leave_if_wrong()
            return
        publisher, _ = self._told[wrong]
        if publisher == self.me:
            self._judge_parameters(wrong, found[wrong])
        else:
            self._found = None  # the answer, or another view, brings the end
            self._send(publisher, Doubt(step=self.committed, shard=wrong, parameters=True))

    def _judge_parameters(self, shard: int, now: int | None) -> None:
        publisher, told = self._told[shard]
        verdict = judge_parameters(
            shard=shard, step=self.committed, member=self.me, publisher=publisher, told=told, now=now
        )
        self._fail("DivergedError", verdict.reason)

    def _on_parameters_digested(self, event: p.ParametersDigested) -> None:
        if event.turn == self._turn:
            self._found = event.digests

    def _is_compared(self) -> bool:
        """What this member has computed with is what was published. Alone, there is nobody to compare with."""
        return self._compared or not self._others

    # ------------------------------------------------------------------------------------------------------ doubts

    def _doubt(self, shard: int, step: int) -> None:
        """This backup's update is not the primary's: make it again, from what is here."""
        assert self.record is not None
        held = self.held[shard]
        held.difference = Difference(
            shard=shard,
            step=step,
            member=self.me,
            primary=held.primary,
            told=held.expected[step],
            found=held.scratch[step],
        )
        self._do(p.UpdateAgain(record=self.record, shard=shard, touched=held.kept[step].touched))

    def _is_in_doubt(self) -> bool:
        return any(held.difference for held in self.held.values())

    def _on_updated_again(self, event: p.UpdatedAgain) -> None:
        held = self.held.get(event.shard)
        if held is None or held.difference is None or held.difference.step != event.step:
            return
        held.scratch[event.step] = event.digest
        verdict = look_again(held.difference, verified=held.digest, verified_now=event.before, found_now=event.digest)
        if verdict is not None:
            self._conclude(held, verdict)
        else:
            self._ask(event.shard)

    def _ask(self, shard: int) -> None:
        """All others, whether or not they hold it: the same question in every view."""
        held = self.held[shard]
        assert held.difference is not None
        held.answers.clear()
        for member in self._others:
            self._send(member, Doubt(step=held.difference.step, shard=shard, parameters=False))
        self._judge(held)

    def _ask_again(self) -> None:
        """A new view: some of those who were asked are gone."""
        for shard in [shard for shard, held in self.held.items() if held.difference]:
            if not self._over:
                self._ask(shard)

    def _on_doubt(self, source: str, message: Doubt) -> None:
        """What is here now, if this member has made it itself. Where it has still to do so, it answers afterwards."""
        shard, held = message.shard, self.held.get(message.shard)
        if message.step != self.committed:
            self._answer(source, message, None)
        elif message.parameters:
            self._do(p.DigestAgain(step=message.step, shard=shard, parameters=True, asker=source))
        elif held is None or (held.is_copy and held.version == message.step):
            self._answer(source, message, None)
        elif held.version == message.step:
            self._do(p.DigestAgain(step=message.step, shard=shard, parameters=False, asker=source))
        elif message.step in held.scratch:
            self._answer(source, message, held.scratch[message.step])
        elif message.step in held.kept:
            held.askers.add(source)
        else:
            self._answer(source, message, None)

    def _answer(self, to: str, asked: Doubt, digest: int | None) -> None:
        self._send(to, Evidence(step=asked.step, shard=asked.shard, parameters=asked.parameters, digest=digest))

    def _on_digested_again(self, event: p.DigestedAgain) -> None:
        if event.asker == self.me:
            self._on_replaced(event.shard, event.digest)
        elif event.asker in self._others:
            asked = Doubt(step=event.step, shard=event.shard, parameters=event.parameters)
            self._answer(event.asker, asked, event.digest)

    def _replace_parameters(self, shard: int, command: p.Command) -> None:
        """Become its primary. Where its parameters had come from the last one, they must be what this member's are."""
        look = p.DigestAgain(step=self.committed, shard=shard, parameters=True, asker=self.me)
        had = [look] if self.parameters[shard] == self.committed else []
        for each in (*had, command, *had):
            self._do(each)

    def _on_replaced(self, shard: int, digest: int) -> None:
        before = self._replaced.pop(shard, None)
        if before is None:
            self._replaced[shard] = digest
        elif before != digest:
            self._fail("DivergedError", other_primary(shard=shard, step=self.committed, member=self.me).reason)

    def _answer_askers(self, shard: int, step: int) -> None:
        """This member's own update is made."""
        held = self.held[shard]
        for member in sorted(held.askers & set(self._others)):
            self._answer(member, Doubt(step=step, shard=shard, parameters=False), held.scratch[step])
        held.askers.clear()

    def _on_evidence(self, source: str, message: Evidence) -> None:
        held = self.held.get(message.shard)
        if message.step != self.committed:
            return
        if message.parameters:
            if self._told.get(message.shard, ("", 0))[0] == source:
                self._judge_parameters(message.shard, message.digest)
        elif message.shard in self._broken:
            self._judge_copy(message.shard, source, message.digest)
        elif held is not None and held.difference is not None:
            held.answers[source] = message.digest
            self._judge(held)

    def _judge(self, held: HeldShard) -> None:
        assert held.difference is not None
        if held.answers.keys() >= set(self._others):
            self._conclude(held, judge(held.difference, held.answers))

    def _conclude(self, held: HeldShard, verdict: Verdict) -> None:
        assert held.difference is not None
        shard, step = held.difference.shard, held.difference.step
        if verdict.ends is Ends.NOTHING:
            held.difference = None
            self._do(p.Noticed(reason=verdict.reason))
            self._verify(shard, step)
        else:
            self._end(verdict)

    def _end(self, verdict: Verdict) -> None:
        """A member that is wrong looks at its parameters before it goes: what it computed with them stays in sums."""
        if verdict.ends is Ends.MEMBER:
            self._verdict = verdict
            self._forget_comparison()
        else:
            self._fail("DivergedError", verdict.reason)

    def _leave_if_wrong(self) -> None:
        if self._verdict is not None:
            self._fail("CorruptedError", self._verdict.reason)

    def _judge_copy(self, shard: int, sender: str, now: int | None) -> None:
        known, told, _ = self._broken[shard]
        if known == sender:
            self._end(judge_copy(shard=shard, step=self.committed, receiver=self.me, sender=sender, told=told, now=now))

    def _end_in_doubt(self, shard: int) -> None:
        """The state is needed, or goes, before it is known whose is right."""
        difference = self.held[shard].difference
        assert difference is not None
        reason = f"{difference}, and {difference.primary} was lost before it was known which of the two is wrong"
        self._fail("DivergedError", f"{reason}: start the job again")
