"""Compare the parameters that this member computes with to what was published, before it votes.

A member digests all that its model has when it has computed its last run of a step, so that nothing computed with wrong
parameters is ever committed. The verdicts are in witness.py.

Tell backups what this primary's states are worth, and everybody what was published: digests, made behind.

Look at states of which nobody has a second copy: when they are made, and again before the next update.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastrain import protocol as p
from elastrain.integrity.arbitration import Side, changed_since, judge_parameters, other_primary
from elastrain.job.placement import Placement
from elastrain.job.values import Shape
from elastrain.member.contract import MemberPart, handles
from elastrain.member.integrity.repair import Repair
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import Digests, Doubt


class Comparison(MemberPart):
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

    def begin(self, step: int) -> None:
        """Forget digests of the last step's parameters."""
        self.forget_view()

    def forget_view(self) -> None:
        """Forget digests that were told in the last view: publishers tell them again."""
        self._told.clear()
        self.forget_found()

    def why_not_yet(self) -> str:
        """Compare first: a step that was computed with wrong parameters or states is never committed."""
        if not self.is_settled():
            return f"the parameters of step {self._commit.step} are not compared yet with those that were published"
        return "the states that this member has taken over are not verified yet" if self.is_looking() else ""

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

    def go_on(self) -> bool:
        """Digest the model's parameters, and compare them when all digests are told. Returns True if it did either."""
        if self._found is None:
            if self._asked_turn == self._turn:
                return False
            self._asked_turn = self._turn
            needed = tuple(self._commit.parameters.needed())
            self._out.do(p.DigestParameters(turn=self._turn, needed=needed))
            return True
        if any(shard not in self._told for shard in self._commit.parameters.needed()):
            return False
        self.compare(self._found)
        return True

    @handles(p.ParametersDigested)
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
        """Digest a state that is new, or is about to work on the model's memory; `Mismatches` looks at the answer."""
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


class DigestBroadcast(MemberPart):
    """Owns whether digests are being made."""

    def __init__(
        self, views: Views, commit: Commit, holdings: Holdings, comparison: Comparison, repair: Repair, out: Commands
    ) -> None:
        self.is_digesting = False
        """The states must stay as they are until their digests are taken: no vote meanwhile."""
        self._views, self._commit, self._holdings = views, commit, holdings
        self._comparison, self._repair, self._out = comparison, repair, out
        self._has_announced_initial = False
        """Whether the digests of the parameters that the job starts with were asked for in this view."""

    def forget_view(self) -> None:
        self._has_announced_initial = False

    def why_not_yet(self) -> str:
        """Keep the states as they are until their digests are taken."""
        return "states are being digested" if self.is_digesting else ""

    def announce_initial(self) -> bool:
        """Announce digests of the initial state, once per view. Returns True if this call has."""
        if self._has_announced_initial:
            return False
        self._has_announced_initial = True
        # A backup notes what its own are worth: nothing is compared with them before the first update.
        roles, held = self._commit.roles, tuple(self._holdings)
        self.announce(held, roles.mine, roles.live)
        return True

    def announce(self, states: Iterable[int], published: Iterable[int], before: Placement) -> None:
        """Digest these states, and what was published of these shards.

        `before`: the holders until now. Those whose role has just ended still compare what they have.
        """
        wanted = tuple(shard for shard in states if self._is_compared(shard, before))
        told = tuple(published) if self._views.others else ()
        # Where nobody compares, digests would be work for nothing: a job of one makes none.
        if wanted or told:
            self.is_digesting = True
            self._out.do(p.ComputeDigests(step=self._commit.step, shards=wanted, published=told))
        else:
            self._holdings.drop_leaving()

    def _is_compared(self, shard: int, before: Placement) -> bool:
        """Whether another member compares its copy of this shard with ours."""
        # Also with holders whose role has just ended, and with followers: they have made the same update.
        roles = self._commit.roles
        holders = {*before[shard].all, *roles.live[shard].all, *roles.readers(shard)}
        return not holders.isdisjoint(self._views.others)

    def _has_changed(self, event: p.StatesDigested) -> bool:
        """Whether something is not what was told of it before: then it is not told again, but given up."""
        # Told anew in every view: what has changed meanwhile would be taken for right by all who compare with it.
        for shard in sorted({*event.digests, *event.published}):
            held = self._holdings.find(shard)
            if held is None or held.version != event.step:
                continue
            state, published = event.digests.get(shard, held.digest), event.published.get(shard, held.published)
            if held.digest not in (None, state) or held.published not in (None, published):
                self._repair.give_up(shard, changed_since(shard=shard, step=event.step, member=self._views.me))
            # Remembered: a copy that is given later carries the digest that others have compared.
            held.digest, held.published = state, published
        return self._repair.is_due

    @handles(p.StatesDigested)
    def on_digested(self, event: p.StatesDigested) -> None:
        self.is_digesting = False
        # A view came in between, or another step: its own announcement tells what counts then.
        if event.step != self._commit.step or self._views.is_recovering:
            return
        if self._has_changed(event):
            return
        self._comparison.tell_own(event.published)
        is_told = self._commit.roles.is_mine if self._commit.is_initial else lambda _: True
        message = Digests(
            step=event.step,
            digests=tuple(sorted((shard, digest) for shard, digest in event.digests.items() if is_told(shard))),
            parameters=tuple(sorted(event.published.items())),
        )
        self._out.send_all(self._views.others, message)
        self._holdings.drop_leaving()


class SoleCopies(MemberPart):
    """Owns whether the lone states of the open step were looked at.

    They are where audits are on, and else in a job with backups once this member has had others.
    """

    def __init__(
        self, me: str, views: Views, commit: Commit, holdings: Holdings, comparison: Comparison, shape: Shape
    ) -> None:
        self._me = me
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._comparison = comparison
        self._is_backed = shape.backups > 0
        self._is_on = shape.audit.every > 0
        self._has_looked = False

    def begin(self, step: int) -> None:
        """Digest sole copies again in the new step."""
        self._has_looked = False

    def forget_view(self) -> None:
        """Digest again in the new view: other states are sole copies there."""
        self._has_looked = False

    def note(self, shards: Iterable[int]) -> None:
        """Digest those of these states that are lone, as they have just been made."""
        # At once, before anything is published: what changes later is known by this digest alone.
        for shard in self._lone(shards):
            self._comparison.look_at_own(shard)

    def look_again(self) -> bool:
        """Digest the sole copies again, once in each step. `Mismatches` judges the answers. Returns True if it did."""
        if self._has_looked:
            return False
        self._has_looked = True
        self.note(self._commit.roles.mine)
        return True

    def why_not_yet(self) -> str:
        """Digest sole copies before the vote: no other member could notice that one has changed."""
        if self._has_looked or not self._lone(self._commit.roles.mine):
            return ""
        return "states that only this member holds are not digested yet"

    def _lone(self, shards: Iterable[int]) -> list[int]:
        # Two looks cost almost half an update per step: a job that is meant to have one copy asks for them by audits.
        self._is_on = self._is_on or (self._is_backed and bool(self._views.others))
        if not self._is_on:
            return []
        live, step = self._commit.roles.live, self._commit.step
        return [s for s in shards if live[s].all == (self._me,) and self._holdings.has(s, step)]
