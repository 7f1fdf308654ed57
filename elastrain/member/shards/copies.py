"""Copy shards towards the members that should hold them: what this primary gives, and what this member takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from elastrain import protocol as p
from elastrain.integrity.arbitration import Side, judge_copy
from elastrain.member.contract import MemberPart, handles
from elastrain.member.integrity.repair import Repair
from elastrain.member.shards.reduction import Reduction
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import Commit
from elastrain.member.state.holdings import Holdings
from elastrain.member.state.member_views import Views
from elastrain.protocol.messages import Copied, Doubt, Evidence, ShardCopy

COPY_BUDGET_BYTES = 4 << 20
"""So many parameters a primary has on their way towards new holders at a time: the vote waits for them."""
Copy: TypeAlias = tuple[int, str]
"""(shard, member that is to hold it)."""


class CopiesGiven(MemberPart):
    """Owns what is still to be copied from here, and what is on its way."""

    def __init__(
        self,
        sizes: Sequence[int],
        views: Views,
        commit: Commit,
        holdings: Holdings,
        reduction: Reduction,
        out: Commands,
    ) -> None:
        self.budget_bytes = COPY_BUDGET_BYTES
        """So many bytes of parameters may be on their way at a time; one shard always may."""
        self.sent_bytes = 0
        """Of parameters, in all."""
        self._sizes = sizes
        self._views = views
        self._commit = commit
        self._holdings = holdings
        self._reduction = reduction
        self._out = out
        self._due: list[Copy] = []
        """In the order in which they are made: what is short of holders comes first."""
        self._restoring: set[Copy] = set()
        """Those of them, due or under way, that give a shard the holders that it lacks."""
        self._under_way: set[Copy] = set()
        self._has_moved = False
        """Whether a copy was sent in this step."""

    def limit(self, budget_bytes: int) -> None:
        """Let at most so many bytes of parameters be on their way at a time."""
        self.budget_bytes = budget_bytes

    def plan(self) -> None:
        """Find out what is still to be copied towards the target, shard by shard."""
        roles = self._commit.roles
        self._commit.shortage.look(self._commit.step + 1, roles.live, roles.target)
        first, moving = roles.copies_to_make(self._views.view.nodes)
        self._due, self._restoring = [*first, *moving], set(first)

    def forget_view(self) -> None:
        # Who was to take them may be gone, and their numbers with it: the next plan begins from the roles.
        self._under_way.clear()
        self._due.clear()

    def begin(self, step: int) -> None:
        """Begin a step in which no copy was sent yet."""
        self._has_moved = False

    def why_not_yet(self) -> str:
        """Send the copies of this step, and wait until their receivers have them: the state moves on afterwards."""
        if self.is_reading():
            return "a copy of a shard is on its way"
        if self.is_overdue():
            return "a shard has had too few holders since the step before: a copy is still to be sent"
        return "" if self.has_moved() else "a copy of a shard is still to be sent in this step"

    # ----------------------------------------------------------------------------------------- what a vote waits for

    def is_reading(self) -> bool:
        """Whether a copy is still being read: a vote waits for it, since the state moves on afterwards."""
        return bool(self._under_way)

    def has_moved(self) -> bool:
        """Whether this step has brought something nearer to the target: else backups might never come back."""
        return not self._due or self._has_moved

    def is_overdue(self) -> bool:
        """Whether shards of this member's were short of holders in the step before already: now they get them."""
        step = self._commit.step + 1
        return any(copy in self._restoring and self._commit.shortage.is_overdue(copy[0], step) for copy in self._due)

    # ----------------------------------------------------------------------------------------------------- sending

    def is_waiting(self) -> bool:
        """Whether a copy would be sent now, if there is time for it."""
        return any(self._has_room(copy) for copy in self._due)

    def send_overdue(self) -> None:
        """Send what the vote of this step waits for."""
        step = self._commit.step + 1
        for copy in [c for c in self._due if c in self._restoring and self._commit.shortage.is_overdue(c[0], step)]:
            if self._has_room(copy):
                self._start(copy)

    def send(self, parameters_bytes: int) -> None:
        """Send copies until so many bytes are reached; one at least."""
        sent_bytes = 0
        for copy in list(self._due):
            if sent_bytes >= parameters_bytes:
                return
            if self._has_room(copy):
                self._start(copy)
                sent_bytes += self._sizes[copy[0]]

    def _has_room(self, copy: Copy) -> bool:
        shard, _ = copy
        # A state that is a step behind would be a copy of something else than the receiver expects.
        if not self._holdings.has(shard, self._commit.step):
            return False
        under_way_bytes = sum(self._sizes[each] for each, _ in self._under_way)
        return not under_way_bytes or under_way_bytes + self._sizes[shard] <= self.budget_bytes

    def _start(self, copy: Copy) -> None:
        self._has_moved = True
        self.sent_bytes += self._sizes[copy[0]]
        self._due.remove(copy)
        self._under_way.add(copy)
        self._send(*copy)

    def _send(self, shard: int, member: str) -> None:
        # With the digest that is known to be right, so that what has changed here since does not spread.
        digest = self._holdings[shard].digest
        self._out.send(member, ShardCopy(step=self._commit.step, shard=shard, digest=digest))

    @handles(Copied)
    def on_copied(self, source: str, message: Copied) -> None:
        # An answer to a copy of the last view: whether it was taken is known no more.
        if (message.shard, source) not in self._under_way:
            return
        if not message.intact:
            self._send(message.shard, source)
            return
        self._under_way.remove((message.shard, source))
        self._restoring.discard((message.shard, source))
        self._commit.roles.follow(message.shard, source)
        # This step's gradient was forwarded before it followed: without it, the copy would be a step behind at once.
        if message.shard in self._reduction.finished:
            self._reduction.forward([message.shard], only=source)


class CopiesTaken(MemberPart):
    """Owns what did not come through of the copies that were sent to this member."""

    def __init__(self, me: str, commit: Commit, holdings: Holdings, repair: Repair, out: Commands) -> None:
        self._me = me
        self._commit = commit
        self._holdings = holdings
        self._repair = repair
        self._out = out
        self._broken: dict[int, tuple[str, int, int]] = {}
        """Shard whose copy did not come through -> sender, digest that was told, how often."""

    def begin(self, step: int) -> None:
        """Forget damaged copies of the last step."""
        self._broken.clear()

    def forget_view(self) -> None:
        """Forget damaged copies of the last view: copies are sent anew."""
        self._broken.clear()

    @handles(ShardCopy)
    def on_copy(self, source: str, message: ShardCopy, payload: object) -> None:
        step, shard, digest = message.step, message.shard, message.digest
        # A copy of a step that is over would be verified against a state that its sender has no more.
        if step == self._commit.step:
            self._out.do(p.TakeCopy(step=step, shard=shard, payload=payload, source=source, digest=digest))

    def on_taken(self, event: p.TookCopy) -> None:
        if event.step != self._commit.step:
            return
        if not event.intact:
            self._take_again(event)
            return
        self._broken.pop(event.shard, None)
        self._holdings.take(event.shard, event.step, event.told)
        self._out.send(event.source, Copied(step=event.step, shard=event.shard, intact=True))

    def _take_again(self, event: p.TookCopy) -> None:
        """Ask for a copy once more; then its sender has to say whether it still has what it told."""
        times = self._broken.get(event.shard, ("", 0, 0))[2] + 1
        # The first time it may have been damaged on its way; the second time one of the two machines is wrong.
        self._broken[event.shard] = (event.source, event.told, times)
        if times == 1:
            self._out.do(p.Noticed(reason=f"the copy of shard {event.shard} from {event.source} is damaged: once more"))
            self._out.send(event.source, Copied(step=event.step, shard=event.shard, intact=False))
        else:
            self._out.send(event.source, Doubt(step=event.step, shard=event.shard, parameters=False))

    def is_about(self, shard: int) -> bool:
        """Whether evidence of this shard's state answers the question of a broken copy."""
        return shard in self._broken

    def on_evidence(self, source: str, message: Evidence) -> None:
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
            # A sender that has it no more as it was says so itself; the step begins anew, and with it the copies.
            if verdict.wrong is Side.MEMBER:
                self._repair.own_fault(verdict.reason)
            else:
                self._repair.begin_anew(verdict.reason)
