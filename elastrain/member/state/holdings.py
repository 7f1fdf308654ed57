"""States of shards that are in this member's hands: which version, what is kept beside it, what is said about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from elastrain import protocol as p
from elastrain.integrity.arbitration import Difference
from elastrain.job.placement import Holders
from elastrain.member.contract import MemberPart
from elastrain.member.state.ballot import Commands
from elastrain.member.state.committed import NEVER
from elastrain.member.state.runs import FinishedGradient


@dataclass
class HeldShard:
    """A shard's state in this member's hands."""

    version: int = NEVER
    """The step after which it stands, verified (or its own work as primary)."""
    kept: dict[int, FinishedGradient] = field(default_factory=dict)
    """Finished gradients by step, until their update is verified."""
    scratch: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the update made behind, not yet verified."""
    expected: dict[int, int] = field(default_factory=dict)
    """Step -> the primary's digest."""
    owed: dict[int, str] = field(default_factory=dict)
    """Step -> the primary that waits for an acknowledgement."""
    digest: int | None = None
    """Of the state at `version`, when it was last compared or told; None: never."""
    published: int | None = None
    """Digest of the parameters at `version`, when this member told it as their publisher; None: never."""
    is_copy: bool = False
    """It was copied from its primary as of `version`: equal to that whether right or wrong."""
    primary: str = ""
    """Who told what is expected."""
    difference: Difference | None = None
    """Its update and the primary's are not the same; which is right is being found out."""
    answers: dict[str, int | None] = field(default_factory=dict)
    """What others told of it."""
    askers: set[str] = field(default_factory=set)
    """Members that wait for the digest of the update that this member is about to make."""

    def apply(self, step: int) -> None:
        """Its primary has made the update of `step`: nothing that belongs to an earlier one counts any more."""
        # Gradients of later steps stay: a backup until now, it may have the next step's already.
        before, self.digest = self.digest, None
        self.version, self.is_copy, self.published = step, False, None
        self.kept = {later: gradient for later, gradient in self.kept.items() if later > step}
        self.scratch.clear()
        # What it told of the version before: a backup may send that one back, where it is in doubt about the update.
        self.expected = {} if before is None else {step - 1: before}

    def verify(self, step: int) -> None:
        """The update that was made behind is the primary's."""
        self.digest = self.scratch.pop(step)
        del self.expected[step]
        self.version, self.is_copy, self.published = step, False, None
        self.kept.pop(step, None)

    def replace(self, step: int, digest: int) -> None:
        """A copy of the primary's state as of `step` has taken its place."""
        # Equal to its primary's state whether that is right or wrong: it can follow, but it cannot be a witness.
        self.version, self.is_copy, self.digest, self.published = step, True, digest, None
        self.kept.clear()
        self.scratch.clear()
        self.expected.clear()


class Holdings(MemberPart):
    """Owns the shards that this member has, and which of them are to go."""

    def __init__(self, out: Commands) -> None:
        self.bound: set[int] = set()
        """Shards whose state works on the model's own memory: this member is their primary."""
        self._out = out
        self._held: dict[int, HeldShard] = {}
        self._leaving: set[int] = set()
        """Shards whose holder this member is no longer, until others need it no more."""

    def __contains__(self, shard: int) -> bool:
        return shard in self._held

    def __getitem__(self, shard: int) -> HeldShard:
        return self._held[shard]

    def __iter__(self) -> Iterator[int]:
        # Sorted, so that the same events lead to the same commands: a log replays a member exactly.
        return iter(sorted(self._held))

    def find(self, shard: int) -> HeldShard | None:
        return self._held.get(shard)

    def of(self, shard: int) -> HeldShard:
        """The shard's state, which may be about to come."""
        return self._held.setdefault(shard, HeldShard())

    def has(self, shard: int, version: int) -> bool:
        """Whether its verified state is here as of this step."""
        return shard in self._held and self._held[shard].version == version

    def in_doubt(self) -> list[int]:
        """Shards of which it is not known whether this member or the primary is wrong."""
        return [shard for shard, held in self._held.items() if held.difference]

    def forget_view(self) -> None:
        """Forget those who wait for something: in the next view they ask again."""
        # An answer to a question of the last view could be taken for one of this view.
        for held in self._held.values():
            held.owed.clear()
            held.askers.clear()

    def why_not_yet(self) -> str:
        """Keep all states as they are until it is known which side is wrong."""
        doubts = self.in_doubt()
        return f"it is not known yet which copy of shard {doubts[0]} is wrong" if doubts else ""

    def void_step(self, step: int) -> None:
        """The finished gradients of this step count for nothing."""
        for held in self._held.values():
            held.kept.pop(step, None)
            held.owed.pop(step, None)

    def change_role(self, me: str, shard: int, before: Holders, after: Holders) -> None:
        """Follow a commit that has changed the shard's holders."""
        if me == before.primary != after.primary and me in after.backups:
            self.unbind([shard])
        # Only now: a follower's copy stays, its own time as a holder is still to come.
        if me in before.all and me not in after.all:
            self._leaving.add(shard)

    def unbind(self, shards: Iterable[int]) -> None:
        """Give the model's memory back: this member is no longer their primary."""
        for shard in sorted(shards):
            self.bound.discard(shard)
            self._out.do(p.Unbind(shard=shard))

    def take(self, shard: int, step: int, digest: int) -> None:
        """A copy of the primary's state as of `step` has come."""
        # A holder whose role has just ended may be wanted again, where blocks come back to it.
        self._leaving.discard(shard)
        self.of(shard).replace(step, digest)

    def drop_leaving(self) -> None:
        """Let go of what others hold now, but for what is being compared."""
        # Not in the commit itself: until the new holders have told their digests, this copy can still be a witness.
        for shard in sorted(self._leaving):
            held = self._held.get(shard)
            if held is None or held.difference is None:
                self.drop(shard)

    def drop(self, shard: int) -> None:
        # Letting go of one of two states that differ would destroy the evidence.
        held = self._held.get(shard)
        if held is not None and held.difference is not None:
            self.end_in_doubt(held.difference)
            return
        self._leaving.discard(shard)
        self.bound.discard(shard)
        if self._held.pop(shard, None) is not None:
            self._out.do(p.Drop(shard=shard))

    def disown(self, shard: int) -> None:
        """This member has the shard no more. Its memory stays: others may be reading what was sent of it."""
        self._leaving.discard(shard)
        self.bound.discard(shard)
        self._held.pop(shard, None)

    def drop_disowned(self, shards: Iterable[int]) -> None:
        """In the next view nobody reads it any more."""
        for shard in sorted(shards):
            if shard not in self._held:
                self._out.do(p.Drop(shard=shard))

    def end_in_doubt(self, difference: Difference) -> None:
        """The state is needed, or goes, before it is known whose is right."""
        reason = f"{difference}, and {difference.primary} was lost before it was known which of the two is wrong"
        self._out.fail("DivergedError", f"{reason}: start the job again")
