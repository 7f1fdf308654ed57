"""States of shards that this member has: versions, kept gradients, digests, and open doubts."""

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
    """Record of one shard's state on this member."""

    version: int = NEVER
    """Step after which the state stands, verified, or made by this member as the primary."""
    kept: dict[int, FinishedGradient] = field(default_factory=dict)
    """Finished gradients by step, until their update is verified."""
    scratch: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the backup's update, not yet verified."""
    expected: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the primary's update."""
    owed: dict[int, str] = field(default_factory=dict)
    """Step -> the primary that waits for an acknowledgement."""
    digest: int | None = None
    """Digest of the state at `version`, as it was last compared or announced. None: never."""
    published: int | None = None
    """Digest of the parameters at `version`, as this member announced it as their publisher. None: never."""
    is_copy: bool = False
    """True if the state was copied from its primary at `version`: it equals the primary's, right or wrong."""
    primary: str = ""
    """The primary that sent the digests in `expected`."""
    difference: Difference | None = None
    """The open doubt: this update differs from the primary's, and it is not known which is right."""
    answers: dict[str, int | None] = field(default_factory=dict)
    """Member -> its answer about the doubt."""
    askers: set[str] = field(default_factory=set)
    """Members that wait for the digest of the update that this member is about to make."""

    def apply(self, step: int) -> None:
        """Note that this primary has made the update of `step`. Records of earlier steps are dropped."""
        # Gradients of later steps stay: a former backup may have the next step's already.
        before, self.digest = self.digest, None
        self.version, self.is_copy, self.published = step, False, None
        self.kept = {later: gradient for later, gradient in self.kept.items() if later > step}
        self.scratch.clear()
        # The digest of the version before stays: a backup in doubt about the update may send that state back.
        self.expected = {} if before is None else {step - 1: before}

    def verify(self, step: int) -> None:
        """Make the update of `step` the state: it equals the primary's."""
        self.digest = self.scratch.pop(step)
        del self.expected[step]
        self.version, self.is_copy, self.published = step, False, None
        self.kept.pop(step, None)

    def replace(self, step: int, digest: int) -> None:
        """Replace the record by that of a copy of the primary's state after `step`."""
        # A copy equals its primary's state, right or wrong. It can follow, but it cannot be a witness.
        self.version, self.is_copy, self.digest, self.published = step, True, digest, None
        self.kept.clear()
        self.scratch.clear()
        self.expected.clear()


class Holdings(MemberPart):
    """Part that owns the records of all shards on this member."""

    def __init__(self, out: Commands) -> None:
        self.bound: set[int] = set()
        """Shards whose state works on the model's own memory: this member is their primary."""
        self._out = out
        self._held: dict[int, HeldShard] = {}
        self._leaving: set[int] = set()
        """Shards that this member holds no longer, but keeps until their new holders have announced digests."""

    def __contains__(self, shard: int) -> bool:
        return shard in self._held

    def __getitem__(self, shard: int) -> HeldShard:
        return self._held[shard]

    def __iter__(self) -> Iterator[int]:
        # Sorted, so that the same events lead to the same commands. A log replays a member exactly.
        return iter(sorted(self._held))

    def find(self, shard: int) -> HeldShard | None:
        """Return the shard's record, or None."""
        return self._held.get(shard)

    def of(self, shard: int) -> HeldShard:
        """Return the shard's record, which is created if it is missing."""
        return self._held.setdefault(shard, HeldShard())

    def has(self, shard: int, version: int) -> bool:
        """Return True if the shard's verified state after step `version` is here."""
        return shard in self._held and self._held[shard].version == version

    def in_doubt(self) -> list[int]:
        """Return the shards with an open doubt: this member's state or the primary's is wrong."""
        return [shard for shard, held in self._held.items() if held.difference]

    def forget_view(self) -> None:
        """Forget the members that wait for an answer: in the next view they ask again."""
        # An answer to a question of the last view could be taken for one of this view.
        for held in self._held.values():
            held.owed.clear()
            held.askers.clear()

    def why_not_yet(self) -> str:
        """Keep all states as they are until it is known which side is wrong."""
        doubts = self.in_doubt()
        return f"it is not known yet which copy of shard {doubts[0]} is wrong" if doubts else ""

    def void_step(self, step: int) -> None:
        """Drop the finished gradients of this step, because it begins anew."""
        for held in self._held.values():
            held.kept.pop(step, None)
            held.owed.pop(step, None)

    def change_role(self, me: str, shard: int, before: Holders, after: Holders) -> None:
        """Follow a commit that has changed the shard's holders."""
        if me == before.primary != after.primary and me in after.backups:
            self.unbind([shard])
        # A follower was not a holder before: its copy stays.
        if me in before.all and me not in after.all:
            self._leaving.add(shard)

    def unbind(self, shards: Iterable[int]) -> None:
        """Unbind states from the model's memory, because this member is no longer their primary."""
        for shard in sorted(shards):
            self.bound.discard(shard)
            self._out.do(p.Unbind(shard=shard))

    def take(self, shard: int, step: int, digest: int) -> None:
        """Note that a copy of the primary's state after `step` was taken."""
        # A former holder may become one again, if blocks come back to it.
        self._leaving.discard(shard)
        self.of(shard).replace(step, digest)

    def drop_leaving(self) -> None:
        """Drop the states that other members hold now, except for those in doubt."""
        # The commit itself does not drop them: until the new holders have announced digests, this copy can be a
        # witness.
        for shard in sorted(self._leaving):
            held = self._held.get(shard)
            if held is None or held.difference is None:
                self.drop(shard)

    def drop(self, shard: int) -> None:
        """Drop the shard's state. Ends the job if it is in doubt."""
        # Dropping one of two states that differ would destroy the evidence.
        held = self._held.get(shard)
        if held is not None and held.difference is not None:
            self.end_in_doubt(held.difference)
            return
        self._leaving.discard(shard)
        self.bound.discard(shard)
        if self._held.pop(shard, None) is not None:
            self._out.do(p.Drop(shard=shard))

    def disown(self, shard: int) -> None:
        """Remove the shard's record. Its memory stays, because peers may still read what was sent of it."""
        self._leaving.discard(shard)
        self.bound.discard(shard)
        self._held.pop(shard, None)

    def drop_disowned(self, shards: Iterable[int]) -> None:
        """Free the memory of disowned shards: in the next view no peer reads it."""
        for shard in sorted(shards):
            if shard not in self._held:
                self._out.do(p.Drop(shard=shard))

    def end_in_doubt(self, difference: Difference) -> None:
        """End the job, because the state is needed or dropped before it is known which side is right."""
        reason = f"{difference}, and {difference.primary} was lost before it was known which of the two is wrong"
        self._out.fail("DivergedError", f"{reason}: start the job again")
