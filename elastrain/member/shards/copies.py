"""Copies of shards for the members that should hold them: `CopiesGiven` sends, `CopiesTaken` receives."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain, filterfalse
from typing import TypeAlias

from elastrain import protocol as p
from elastrain.integrity.arbitration import Side, judge_copy
from elastrain.job.pieces import state_pieces
from elastrain.job.values import Shape
from elastrain.member.contract import MemberPart, handles
from elastrain.member.integrity.repair import Repair
from elastrain.member.open_step import OpenStep
from elastrain.member.state.ballot import Ballot, Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views
from elastrain.memory.memory_budget import COPY_BUDGET_BYTES
from elastrain.protocol.messages import Copied, DigestReply, Doubt, ShardCopy

Copy: TypeAlias = tuple[int, str]
"""(shard, member that is to hold it)."""


class CopiesGiven(MemberPart):
    """Part that owns the copies that this primary has to send, and those on their way."""

    def __init__(
        self,
        shape: Shape,
        views: Views,
        commit: Commit,
        holdings: Holdings,
        step: OpenStep,
        out: Commands,
    ) -> None:
        self.budget_bytes = COPY_BUDGET_BYTES
        """Bytes of parameters that may be on their way at a time. One shard may always be."""
        self.sent_bytes = 0
        """Bytes of parameters sent so far."""
        self._shape = shape
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._step = step
        self._out = out
        self._due: list[Copy] = []
        """Copies to send, in this order: shards that are short of holders come first."""
        self._restoring: set[Copy] = set()
        """Copies, due or under way, for shards that have too few holders."""
        self._under_way: dict[Copy, int] = {}
        """Copies that were begun and are not confirmed -> the number of their pieces that were sent."""
        self._has_moved = False
        """True if a copy was sent in this step."""

    def limit(self, budget_bytes: int) -> None:
        """Set the bytes of parameters that may be on their way at a time."""
        self.budget_bytes = budget_bytes

    def plan(self) -> None:
        """Plan the copies that bring the holders nearer to the target."""
        roles = self._commit.roles
        self._commit.under_replication.look(self._commit.step + 1, roles.live, roles.target)
        first, moving = roles.copies_to_make(self._views.view.nodes)
        self._due, self._restoring = [*first, *moving], set(first)

    def forget_view(self) -> None:
        """Forget all copies: the next plan begins from the roles."""
        # The receivers may be lost.
        self._under_way.clear()
        self._due.clear()

    def begin(self, step: int) -> None:
        """Begin a step in which no copy was sent yet."""
        self._has_moved = False
        if self._under_way:
            # Copies to shadows, for which the vote did not wait: the states have changed since.
            self._under_way.clear()
            self.plan()

    def why_not_yet(self) -> str:
        """Return why this member cannot vote yet: copies of this step to be sent or received; "" if it can."""
        if self.is_reading():
            return "a copy of a shard is on its way"
        if self.is_overdue():
            return "a shard has had too few holders since the step before: a copy is still to be sent"
        return "" if self.has_moved() else "a copy of a shard is still to be sent in this step"

    # ----------------------------------------------------------------------------------------- what a vote waits for

    def is_reading(self) -> bool:
        """Return True while a copy is on its way. The vote waits, because the state changes after it.

        Copies to shadows do not count: a shadow reads none after its own vote.
        """
        return not all(map(self._is_for_shadow, self._under_way))

    def has_moved(self) -> bool:
        """Return True if a copy was sent in this step or none is due. Otherwise backups might never come back."""
        return self._has_moved or all(map(self._is_for_shadow, self._due))

    def _is_for_shadow(self, copy: Copy) -> bool:
        return self._commit.roles.is_for_shadow(*copy)

    def is_overdue(self) -> bool:
        """Return True if shards of this primary were short of holders in the step before already."""
        return any(map(self._is_overdue, self._due))

    def _is_overdue(self, copy: Copy) -> bool:
        return copy in self._restoring and self._commit.under_replication.is_overdue(copy[0], self._commit.step + 1)

    # ----------------------------------------------------------------------------------------------------- sending

    def takers(self) -> set[str]:
        """Return the members to which a copy, or a piece of one, could be sent now."""
        return {member for _, member in (*self._unsent(), *filter(self._has_room, self._due))}

    def send_overdue(self) -> None:
        """Begin the overdue copies, for which this step's vote waits."""
        for copy in [copy for copy in self._due if self._is_overdue(copy)]:
            if self._has_room(copy):
                self._send_piece(copy)

    def finish(self) -> None:
        """Send all that is left of the copies under way for which this step's vote waits."""
        for copy in self._unsent():
            while not self._is_for_shadow(copy) and self._is_unsent(copy):
                self._send_piece(copy)

    def send(self, parameters_bytes: int, busy: Collection[str] = ()) -> None:
        """Send copies to members that are not `busy`, at least one piece, until `parameters_bytes` are reached."""
        sent_bytes = 0
        while sent_bytes < parameters_bytes and (copy := self._next(busy)) is not None:
            sent_bytes += self._send_piece(copy)

    def _next(self, busy: Collection[str]) -> Copy | None:
        """Return the copy to go on with. No copy begins before all of another one was sent, if its link is free."""
        copies = chain(self._unsent(), filter(self._has_room, self._due))
        return next((copy for copy in copies if copy[1] not in busy), None)

    def _unsent(self) -> list[Copy]:
        return list(filter(self._is_unsent, self._under_way))

    def _is_unsent(self, copy: Copy) -> bool:
        return self._under_way[copy] < self._pieces(copy[0])

    def _pieces(self, shard: int) -> int:
        # Only in pipelines there are boundary tensors, which must not stand behind a whole copy.
        return 1 if self._shape.pipelining is None else state_pieces(self._size(shard))

    def _size(self, shard: int) -> int:
        return self._shape.shards[shard].size_bytes

    def _has_room(self, copy: Copy) -> bool:
        shard, _ = copy
        # The receiver expects the state of the committed step.
        if not self._holdings.has(shard, self._commit.step):
            return False
        # Copies to shadows take no room from those that a vote waits for: they may end with the step only.
        counts: Iterable[Copy] = self._under_way
        if not self._is_for_shadow(copy):
            counts = filterfalse(self._is_for_shadow, self._under_way)
        under_way_bytes = sum(self._size(each) for each, _ in counts)
        return not under_way_bytes or under_way_bytes + self._size(shard) <= self.budget_bytes

    def _send_piece(self, copy: Copy) -> int:
        """Send the next piece of a copy, which may be the first one. Returns its bytes of parameters."""
        shard, member = copy
        if copy in self._due:
            self._has_moved = True
            self._due.remove(copy)
            self._under_way[copy] = 0
        sent, pieces = self._under_way[copy], self._pieces(shard)
        self._under_way[copy] = sent + 1
        # The known digest goes along, so that the receiver detects later changes of this state.
        digest = self._holdings[shard].digest
        self._out.send(member, ShardCopy(step=self._commit.step, shard=shard, digest=digest, part=(sent, pieces)))
        size_bytes = max(1, self._size(shard) // pieces)
        self.sent_bytes += size_bytes
        return size_bytes

    @handles(Copied)
    def on_copied(self, source: str, message: Copied) -> None:
        """Note that a copy was taken: its receiver follows the shard. A damaged copy is sent again."""
        # This answers a copy of the last view, or one that came too late for a shadow.
        if (message.shard, source) not in self._under_way or message.step != self._commit.step:
            return
        # No member would wait until the shadow has read the gradient. The copy is made again in the next step.
        if self._step.ballot.has_voted and self._is_for_shadow((message.shard, source)):
            return
        if message.refused:
            self._refuse(source, message.refused)
            return
        if not message.intact:
            self._under_way[message.shard, source] = 0
            self._send_piece((message.shard, source))
            return
        del self._under_way[message.shard, source]
        self._restoring.discard((message.shard, source))
        self._commit.roles.follow(message.shard, source)
        # This step's gradient was sent before the new follower joined. Without it the copy would be a step behind.
        if message.shard in self._step.reduction.finished:
            self._step.reduction.forward([message.shard], only=source)

    def _refuse(self, member: str, shards: Sequence[int]) -> None:
        """Send no copies of these shards to a member that has no room for them. No vote waits for them."""
        # Copies that are not sent yet would be refused as well.
        self._commit.roles.refuse(member, shards)
        refused = {(shard, member) for shard in shards}
        self._due = [copy for copy in self._due if copy not in refused]
        for copy in refused:
            self._under_way.pop(copy, None)
        self._restoring -= refused


class CopiesTaken(MemberPart):
    """Part that receives copies, and owns the list of damaged ones, and of those that have no room in memory."""

    def __init__(
        self, me: str, commit: Commit, ballot: Ballot, holdings: Holdings, repair: Repair, out: Commands
    ) -> None:
        self._me = me
        self._commit = commit
        self._ballot = ballot
        self._holdings = holdings
        self._repair = repair
        self._out = out
        self._broken: dict[int, tuple[str, int, int]] = {}
        """Shard whose copy was damaged -> sender, digest that it sent, number of attempts."""
        self._refused: frozenset[int] = frozenset()
        self._read: dict[int, int] = {}
        """Shard -> number of pieces of its copy that were read, if some are still to come."""

    def refuse(self, shards: frozenset[int]) -> None:
        """Take no copies of these shards as a backup, because the memory limit leaves no room for them."""
        if shards - self._refused:
            reason = (
                f"{self._me} has no room for copies of {len(shards)} shards: they survive fewer losses until members "
                "join; a larger --memory-limit leaves room for them"
            )
            self._out.do(p.Noticed(reason=reason))
        self._refused = shards

    def begin(self, step: int) -> None:
        """Forget damaged copies of the last step, and those that have come in part."""
        self.forget_view()

    def forget_view(self) -> None:
        """Forget damaged copies of the last view, and those that have come in part: copies are sent anew."""
        self._broken.clear()
        self._read.clear()

    @handles(ShardCopy)
    def on_copy(self, source: str, message: ShardCopy, payload: object) -> None:
        """Take a copy that a primary has sent, or a piece of it, if it is of the committed step."""
        step, shard, digest, part = message.step, message.shard, message.digest, message.part
        # No member waits until a shadow has read a copy, so after its vote the state may have changed.
        is_void = self._ballot.has_voted and self._commit.roles.is_for_shadow(shard, self._me)
        # The sender no longer has the state of an older step to verify the copy with.
        # The first pieces may have come before a change of view. Their sender begins anew, too.
        if step != self._commit.step or is_void or part[0] not in (0, self._read.get(shard)):
            return
        is_kept = shard in self._holdings or self._commit.roles.is_for_shadow(shard, self._me)
        if shard in self._refused and not is_kept:
            refused = tuple(sorted(self._refused))
            self._out.send(source, Copied(step=step, shard=shard, intact=True, refused=refused))
            return
        self._read[shard] = part[0] + 1
        self._out.do(p.TakeCopy(step=step, shard=shard, payload=payload, source=source, digest=digest, part=part))

    def on_taken(self, event: p.TookCopy) -> None:
        """Acknowledge an intact copy, and have a damaged one sent again."""
        if event.step != self._commit.step:
            return
        if not event.intact:
            self._take_again(event)
            return
        self._broken.pop(event.shard, None)
        self._holdings.take(event.shard, event.step, event.told)
        self._out.send(event.source, Copied(step=event.step, shard=event.shard, intact=True))

    def _take_again(self, event: p.TookCopy) -> None:
        """Ask for the copy again.

        After a second failure, ask the sender if it still has the state that it announced.
        """
        times = self._broken.get(event.shard, ("", 0, 0))[2] + 1
        # The first time the copy may have been damaged on its way. The second time one of the two machines is wrong.
        self._broken[event.shard] = (event.source, event.told, times)
        if times == 1:
            self._out.do(p.Noticed(reason=f"the copy of shard {event.shard} from {event.source} is damaged: once more"))
            self._out.send(event.source, Copied(step=event.step, shard=event.shard, intact=False))
        else:
            self._out.send(event.source, Doubt(step=event.step, shard=event.shard, parameters=False))

    def is_about(self, shard: int) -> bool:
        """Return True if an answer about this shard is about a damaged copy."""
        return shard in self._broken

    def on_reply(self, source: str, message: DigestReply) -> None:
        """Judge which side damaged the copy, and begin the step anew."""
        sender, told, _ = self._broken[message.shard]
        if sender == source:
            verdict = judge_copy(
                shard=message.shard,
                step=self._commit.step,
                receiver=self._me,
                sender=sender,
                told=told,
                now=message.digest,
            )
            # A sender whose state has changed reports it itself. The step begins anew, and so do the copies.
            if verdict.wrong is Side.MEMBER:
                self._repair.own_fault(verdict.reason)
            else:
                self._repair.begin_anew(verdict.reason)
