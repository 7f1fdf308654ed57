"""Comparison of digests: of published parameters, of states with backups, and of sole copies.

`Comparison` checks before each vote that this member has computed with the published parameters, so that no step
computed with wrong ones is committed. `DigestBroadcast` sends digests of this primary's states and parameters.
`SoleCopies` digests states without a second copy when they are made, and again before the next update.
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
    """Part that owns the published digests of parameters, and the digests that were found here."""

    def __init__(self, me: str, views: Views, commit: Commit, repair: Repair, out: Commands) -> None:
        self._me = me
        self._views = views
        self._commit = commit
        self._repair = repair
        self._out = out
        self._told: dict[int, tuple[str, int]] = {}
        """Shard -> publisher of its parameters of the committed step, and the digest that it sent."""
        self._found: dict[int, int] | None = None
        """Shard -> digest of the parameters that this member has computed with. None until they are digested."""
        self._is_equal = False
        """True if the digests found here equal the published ones."""
        self._turn = 0
        """Number of changes that made an earlier comparison void. Answers with an old number are ignored."""
        self._asked_turn = -1
        self._replaced: dict[int, int] = {}
        """Shard -> digest of the parameters that this member had before it became the shard's primary."""
        self._looking: set[int] = set()
        """Shards whose state is being digested, before this member answers for it as the primary."""

    def begin(self, step: int) -> None:
        """Forget digests of the last step's parameters."""
        self.forget_view()

    def forget_view(self) -> None:
        """Forget the digests of the last view: publishers send them again."""
        self._told.clear()
        self.forget_found()

    def why_not_yet(self) -> str:
        """Wait for the comparison: a step that was computed with wrong parameters or states is never committed."""
        if not self.is_settled():
            return f"the parameters of step {self._commit.step} are not compared yet with those that were published"
        return "the states that this member has taken over are not verified yet" if self.is_looking() else ""

    def forget_found(self) -> None:
        """Forget the digests found here, because the parameters, or the shards to compute with, have changed."""
        # An answer that is still on its way has the old number, so it is ignored.
        self._turn += 1
        self._found = None
        self._is_equal = False

    def tell(self, publisher: str, digests: Iterable[tuple[int, int]]) -> None:
        """Note a publisher's digests of shards' parameters after the committed step."""
        self._told.update({shard: (publisher, digest) for shard, digest in digests})

    def tell_own(self, digests: Mapping[int, int]) -> None:
        """Note the digests of the parameters that this member has published."""
        self.tell(self._me, digests.items())

    def is_settled(self) -> bool:
        """Return True if this member has computed with the published parameters, or has no peers to compare with."""
        return self._is_equal or not self._views.others

    def is_looking(self) -> bool:
        """Return True while states that this new primary took over are not yet verified."""
        return bool(self._looking)

    def is_looking_at(self, shard: int) -> bool:
        """Return True while the state of this shard is being digested."""
        return shard in self._looking

    # ---------------------------------------------------------------------------------------------------- comparing

    def may_compare(self) -> bool:
        """Return True if a comparison is still to be made and is possible now."""
        return not self.is_settled() and not self._views.is_recovering and self._commit.parameters.are_here()

    def go_on(self) -> bool:
        """Digest the model's parameters, and compare them once all published digests are here.

        Returns True if it did either.
        """
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
        """Keep the digests of the model's parameters, unless the parameters have changed since."""
        if event.turn == self._turn:
            self._found = event.digests

    def compare(self, found: dict[int, int]) -> None:
        """Compare the digests found here with the published ones, and ask the publisher about the first difference."""
        # The first difference in index order counts, so that all members that find the same one name the same shard.
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

    def on_reply(self, source: str, shard: int, digest: int | None) -> None:
        """Judge a difference by the digest that the publisher has now."""
        # Another member may have become the publisher meanwhile. Its digest is of other memory.
        if self._told.get(shard, ("", 0))[0] == source:
            self._judge(shard, digest)

    def _judge(self, shard: int, now: int | None) -> None:
        publisher, told = self._told[shard]
        verdict = judge_parameters(
            shard=shard, step=self._commit.step, member=self._me, publisher=publisher, told=told, now=now
        )
        # This member has computed with the parameters. Nothing of the step can stay, whichever side is wrong.
        if publisher == self._me:
            self._repair.give_up(shard, verdict.reason)
        elif verdict.wrong is Side.MEMBER:
            self._repair.came_wrong(shard, verdict.reason)
        else:
            self._repair.begin_anew(verdict.reason, {shard: publisher})

    # --------------------------------------------------------------------------------------------- becoming a primary

    def look_at_own(self, shard: int) -> None:
        """Digest a state that is new, or that will work on the model's memory. `Mismatches` judges the answer."""
        self._looking.add(shard)
        self._out.do(p.DigestAgain(step=self._commit.step, shard=shard, parameters=False, asker=self._me))

    def looked_at_own(self, shard: int) -> None:
        """Note that the shard's state was digested."""
        self._looking.discard(shard)

    def replace(self, shard: int, command: p.Command) -> None:
        """Carry out a command that replaces a shard's parameters by equal ones, with a digest before and after."""
        # A new primary's own copy replaces what the last primary had published, and gradients were computed with that.
        look = p.DigestAgain(step=self._commit.step, shard=shard, parameters=True, asker=self._me)
        had = [look] if self._commit.parameters.has(shard) else []
        for each in (*had, command, *had):
            self._out.do(each)

    def on_replaced(self, shard: int, digest: int) -> None:
        """Compare the two digests of `replace`. Begins the step anew if they differ."""
        before = self._replaced.pop(shard, None)
        if before is None:
            self._replaced[shard] = digest
        # If this member's own state was wrong, it is already known which member is at fault.
        elif before != digest and shard not in self._repair.given_up:
            reason = other_primary(shard=shard, step=self._commit.step, member=self._me)
            self._repair.begin_anew(reason, {shard: ""})


class DigestBroadcast(MemberPart):
    """Part that announces digests of states and published parameters to the other members."""

    def __init__(
        self, views: Views, commit: Commit, holdings: Holdings, comparison: Comparison, repair: Repair, out: Commands
    ) -> None:
        self.is_digesting = False
        """True while digests are computed. The states must not change, so there is no vote meanwhile."""
        self._views, self._commit, self._holdings = views, commit, holdings
        self._comparison, self._repair, self._out = comparison, repair, out
        self._has_announced_initial = False
        """True if digests of the job's initial parameters were asked for in this view."""

    def forget_view(self) -> None:
        """Announce the initial digests again in the next view."""
        self._has_announced_initial = False

    def why_not_yet(self) -> str:
        """Keep the states as they are until their digests are taken."""
        return "states are being digested" if self.is_digesting else ""

    def announce_initial(self) -> bool:
        """Announce digests of the initial state, once per view. Returns True if this call did."""
        if self._has_announced_initial:
            return False
        self._has_announced_initial = True
        # A backup digests its own states, too: nothing is compared with them before the first update.
        roles, held = self._commit.roles, tuple(self._holdings)
        self.announce(held, roles.mine, roles.live)
        return True

    def announce(self, states: Iterable[int], published: Iterable[int], before: Placement) -> None:
        """Digest these states, and the published parameters of these shards.

        `before`: the holders until now. Former holders still compare their copies.
        """
        wanted = tuple(shard for shard in states if self._is_compared(shard, before))
        told = tuple(published) if self._views.others else ()
        # Without another member to compare with, no digests are made.
        if wanted or told:
            self.is_digesting = True
            self._out.do(p.ComputeDigests(step=self._commit.step, shards=wanted, published=told))
        else:
            self._holdings.drop_leaving()

    def _is_compared(self, shard: int, before: Placement) -> bool:
        """Return True if another member compares its copy of this shard with the one here."""
        # Former holders and followers compare, too: they have made the same update.
        roles = self._commit.roles
        holders = {*before[shard].all, *roles.live[shard].all, *roles.readers(shard)}
        return not holders.isdisjoint(self._views.others)

    def _has_changed(self, event: p.StatesDigested) -> bool:
        """Give up states and parameters that differ from what was announced of them.

        Returns True if a repair is due.
        """
        # Digests are announced in every view. A changed state must not be announced, or all peers would take it for
        # right.
        for shard in sorted({*event.digests, *event.published}):
            held = self._holdings.find(shard)
            if held is None or held.version != event.step:
                continue
            # A copy that is given later carries the digest that other members have compared.
            if not held.announce(event.digests.get(shard), event.published.get(shard)):
                self._repair.give_up(shard, changed_since(shard=shard, step=event.step, member=self._views.me))
        return self._repair.is_due

    @handles(p.StatesDigested)
    def on_digested(self, event: p.StatesDigested) -> None:
        """Send the computed digests to all members, if they are still of the committed step."""
        self.is_digesting = False
        # After a change of view or step, a new announcement follows.
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
    """Part that digests sole copies: states of shards that only this member holds.

    Sole copies are digested if audits are on. In a job with backups they are digested, too, once this member has had
    peers.
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
        """Digest the sole copies among these states, which have just been made."""
        # This comes before anything is published: later changes are detected by this digest alone.
        for shard in self._sole(shards):
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
        if self._has_looked or not self._sole(self._commit.roles.mine):
            return ""
        return "states that only this member holds are not digested yet"

    def _sole(self, shards: Iterable[int]) -> list[int]:
        # Two digests cost almost half an update per step. A job without backups gets them only if its audits are on.
        self._is_on = self._is_on or (self._is_backed and bool(self._views.others))
        if not self._is_on:
            return []
        live, step = self._commit.roles.live, self._commit.step
        return [s for s in shards if live[s].all == (self._me,) and self._holdings.has(s, step)]
