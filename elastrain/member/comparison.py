"""Compare the parameters that this member computes with to what was published, before it votes.

A member digests all that its model has when it has computed its last run of a step, so that nothing computed with wrong
parameters is ever committed. The verdicts are in witness.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastrain import protocol as p
from elastrain.member.commands import Commands
from elastrain.member.commit import Commit
from elastrain.member.repair import Repair
from elastrain.member.views import Views
from elastrain.messages import Doubt
from elastrain.witness import Side, judge_parameters, other_primary


class Comparison:
    """Owns what was told of the published parameters, and what was found here."""

    def __init__(self, me: str, views: Views, commit: Commit, repair: Repair, out: Commands) -> None:
        self._me = me
        self._views = views
        self._commit = commit
        self._repair = repair
        self._out = out
        self._told: dict[int, tuple[str, int]] = {}
        """Shard -> who published its parameters of the committed step, and their digest there."""
        self._found: dict[int, int] | None = None
        """Shard -> digest of what this member has computed with; None: not known yet."""
        self._is_equal = False
        """Whether the two are known to be equal."""
        self._turn = 0
        """Counts what makes an earlier comparison void."""
        self._asked_turn = -1
        self._replaced: dict[int, int] = {}
        """Shard -> digest of what this member computed with until it became its primary."""
        self._looking: set[int] = set()
        """Shards whose state this member is looking at, before it answers for it."""

    def forget_told(self) -> None:
        """Another step, or another view: what is published is told anew."""
        self._told.clear()
        self.forget_found()

    def forget_found(self) -> None:
        """Other parameters, or more to compute with them: what was found says nothing any more."""
        # An answer that is still on its way has the old number, and is not taken for one of what is here now.
        self._turn += 1
        self._found = None
        self._is_equal = False

    def tell(self, publisher: str, digests: Iterable[tuple[int, int]]) -> None:
        """These are the digests of shards' parameters as they were published after the committed step."""
        self._told.update({shard: (publisher, digest) for shard, digest in digests})

    def tell_own(self, digests: Mapping[int, int]) -> None:
        """As `tell`, of what this member has published."""
        self.tell(self._me, digests.items())

    def is_settled(self) -> bool:
        """What this member has computed with is what was published. Alone, there is nobody to compare with."""
        return self._is_equal or not self._views.others

    def is_looking(self) -> bool:
        """This member does not know yet whether states that it has become the primary of are as they were."""
        return bool(self._looking)

    def is_looking_at(self, shard: int) -> bool:
        return shard in self._looking

    # ---------------------------------------------------------------------------------------------------- comparing

    def may_compare(self) -> bool:
        """Whether there is something left to compare, and somebody to compare with."""
        return not self.is_settled() and not self._views.is_recovering and self._commit.parameters.are_here()

    def go_on(self) -> None:
        """Digest what the model has, and compare it when all is told."""
        if self._found is None:
            if self._asked_turn != self._turn:
                self._asked_turn = self._turn
                needed = tuple(self._commit.parameters.needed())
                self._out.do(p.DigestParameters(turn=self._turn, needed=needed))
        elif all(shard in self._told for shard in self._commit.parameters.needed()):
            self.compare(self._found)

    def on_digested(self, event: p.ParametersDigested) -> None:
        if event.turn == self._turn:
            self._found = event.digests

    def compare(self, found: dict[int, int]) -> None:
        # The first in index order: every member that finds the same difference names the same shard.
        told = ((s, digest) for s, (_, digest) in sorted(self._told.items()) if s in found)
        wrong = next((s for s, digest in told if found[s] != digest), None)
        if wrong is None:
            self._is_equal = True
            return
        publisher, _ = self._told[wrong]
        if publisher == self._me:
            self._judge(wrong, found[wrong])
        else:
            self._found = None  # the answer, or another view, brings the end
            self._out.send(publisher, Doubt(step=self._commit.step, shard=wrong, parameters=True))

    def on_evidence(self, source: str, shard: int, digest: int | None) -> None:
        """The publisher says what it has now."""
        # Another member may have become the publisher meanwhile: its word is about other memory.
        if self._told.get(shard, ("", 0))[0] == source:
            self._judge(shard, digest)

    def _judge(self, shard: int, now: int | None) -> None:
        publisher, told = self._told[shard]
        verdict = judge_parameters(
            shard=shard, step=self._commit.step, member=self._me, publisher=publisher, told=told, now=now
        )
        # Computed with by this member: nothing of the step can stay as it is, whoever is wrong.
        if publisher == self._me:
            self._repair.give_up(shard, verdict.reason)
        elif verdict.wrong is Side.MEMBER:
            self._repair.came_wrong(shard, verdict.reason)
        else:
            self._repair.begin_anew(verdict.reason, {shard: publisher})

    # --------------------------------------------------------------------------------------------- becoming a primary

    def look_at_own(self, shard: int) -> None:
        """Digest a state that is new, or is about to work on the model's memory; `Doubts` looks at the answer."""
        self._looking.add(shard)
        self._out.do(p.DigestAgain(step=self._commit.step, shard=shard, parameters=False, asker=self._me))

    def looked_at_own(self, shard: int) -> None:
        self._looking.discard(shard)

    def replace(self, shard: int, command: p.Command) -> None:
        """Carry out what replaces a shard's parameters, which must then be what they were."""
        # A new primary's own copy takes the place of what the last one had published: gradients were computed with it.
        look = p.DigestAgain(step=self._commit.step, shard=shard, parameters=True, asker=self._me)
        had = [look] if self._commit.parameters.has(shard) else []
        for each in (*had, command, *had):
            self._out.do(each)

    def on_replaced(self, shard: int, digest: int) -> None:
        """The answers to the two looks of `replace`."""
        before = self._replaced.pop(shard, None)
        if before is None:
            self._replaced[shard] = digest
        # Where its own state was wrong it is known already who is to blame.
        elif before != digest and shard not in self._repair.given_up:
            reason = other_primary(shard=shard, step=self._commit.step, member=self._me)
            self._repair.begin_anew(reason, {shard: ""})
