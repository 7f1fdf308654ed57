"""Copy shards towards the members that should hold them: what this primary gives, and what this member takes.

A tier of durable storage would take copies like any other holder to come: it needs a name in `Roles.target` and a
driver that answers `ShardCopy`; giving knows nothing of who takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastrain import protocol as p
from elastrain.member.commands import Commands
from elastrain.member.commit import Commit
from elastrain.member.comparison import Comparison
from elastrain.member.holdings import Holdings
from elastrain.member.reduction import Reduction
from elastrain.messages import Copied, Doubt, Evidence, ShardCopy
from elastrain.witness import judge_copy

COPY_BUDGET_BYTES = 8 << 20
"""So many parameters a primary copies per step towards new holders: the vote waits for what is on its way."""


class CopiesGiven:
    """Owns what is still to be copied from here, and what is on its way."""

    def __init__(
        self, sizes: Sequence[int], commit: Commit, holdings: Holdings, reduction: Reduction, out: Commands
    ) -> None:
        self.budget_bytes = COPY_BUDGET_BYTES
        self._sizes = sizes
        self._commit = commit
        self._holdings = holdings
        self._reduction = reduction
        self._out = out
        self._due: list[tuple[int, str]] = []
        """(shard, member), in the order in which they are made."""
        self._under_way: set[tuple[int, str]] = set()
        self._spent_bytes = 0
        """Of the budget, in this step."""

    def plan(self) -> None:
        """Find out what is still to be copied towards the target, shard by shard."""
        self._due = self._commit.roles.copies_to_make()

    def forget_view(self) -> None:
        # Who was to take them may be gone, and their numbers with it: the next plan begins from the roles.
        self._under_way.clear()

    def renew_budget(self) -> None:
        self._spent_bytes = 0

    def is_reading(self) -> bool:
        """A copy is read before the state moves on, so a vote waits for it."""
        return bool(self._under_way)

    def has_moved(self) -> bool:
        """In each step something comes nearer to the target: else a job might go on for ever without its backups."""
        return not self._due or self._spent_bytes > 0

    def send_due(self) -> None:
        """Send copies up to a number of bytes per step: all members wait for them with their votes."""
        later: list[tuple[int, str]] = []
        for shard, member in self._due:
            # A state that is a step behind would be a copy of something else than the receiver expects.
            spent = self._spent_bytes >= self.budget_bytes
            if spent or self._holdings[shard].version != self._commit.step:
                later.append((shard, member))
                continue
            self._spent_bytes += self._sizes[shard]
            self._under_way.add((shard, member))
            self._send(shard, member)
        self._due = later

    def _send(self, shard: int, member: str) -> None:
        # With the digest that is known to be right, so that what has changed here since does not spread.
        digest = self._holdings[shard].digest
        self._out.send(member, ShardCopy(step=self._commit.step, shard=shard, digest=digest))

    def on_copied(self, source: str, message: Copied) -> None:
        # An answer to a copy of the last view: whether it was taken is known no more.
        if (message.shard, source) not in self._under_way:
            return
        if not message.intact:
            self._send(message.shard, source)
            return
        self._under_way.remove((message.shard, source))
        self._commit.roles.follow(message.shard, source)
        # This step's gradient was forwarded before it followed: without it, the copy would be a step behind at once.
        if message.shard in self._reduction.finished:
            self._reduction.forward([message.shard], only=source)


class CopiesTaken:
    """Owns what did not come through of the copies that were sent to this member."""

    def __init__(self, me: str, commit: Commit, holdings: Holdings, comparison: Comparison, out: Commands) -> None:
        self._me = me
        self._commit = commit
        self._holdings = holdings
        self._comparison = comparison
        self._out = out
        self._broken: dict[int, tuple[str, int, int]] = {}
        """Shard whose copy did not come through -> sender, digest that was told, how often."""

    def forget_broken(self) -> None:
        """Another step, or another view: copies come anew."""
        self._broken.clear()

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
        self._holdings.of(event.shard).replace(event.step, event.told)
        self._out.send(event.source, Copied(step=event.step, shard=event.shard, intact=True))

    def _take_again(self, event: p.TookCopy) -> None:
        """Ask for it once more; then its sender has to say whether it still has what it told."""
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
            self._comparison.end(verdict)
