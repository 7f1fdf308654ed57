"""States of shards that this member has: versions, kept gradients, digests, and open doubts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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

    _version: int = NEVER
    _kept: dict[int, FinishedGradient] = field(default_factory=dict)
    _updates: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the backup's update, not yet verified."""
    _expected: dict[int, int] = field(default_factory=dict)
    """Step -> digest of the primary's update."""
    _owed: dict[int, str] = field(default_factory=dict)
    """Step -> the primary that waits for an acknowledgement."""
    _digest: int | None = None
    _published: int | None = None
    _is_copy: bool = False
    _primary: str = ""
    """The primary that sent the digests in `_expected`."""
    _difference: Difference | None = None

    @property
    def version(self) -> int:
        """Step after which the state stands, verified, or made by this member as the primary."""
        return self._version

    @property
    def kept(self) -> Mapping[int, FinishedGradient]:
        """Finished gradients by step, until their update is verified."""
        return self._kept

    @property
    def digest(self) -> int | None:
        """Digest of the state at `version`, as it was last compared or announced. None: never."""
        return self._digest

    @property
    def published(self) -> int | None:
        """Digest of the parameters at `version`, as this member announced it as their publisher. None: never."""
        return self._published

    @property
    def is_copy(self) -> bool:
        """True if the state was copied from its primary at `version`: it equals the primary's, right or wrong."""
        return self._is_copy

    @property
    def difference(self) -> Difference | None:
        """The open doubt: this update differs from the primary's, and it is not known which is right."""
        return self._difference

    # --------------------------------------------------------------------------------------------------- the state

    def create(self, step: int) -> None:
        """Note that the initial state was created. It counts as the state after `step`."""
        self._version = step

    def apply(self, step: int) -> None:
        """Note that this primary has made the update of `step`. Records of earlier steps are dropped."""
        # Gradients of later steps stay: a former backup may have the next step's already.
        before, self._digest = self._digest, None
        self._version, self._is_copy, self._published = step, False, None
        self._kept = {later: gradient for later, gradient in self._kept.items() if later > step}
        self._updates.clear()
        # The digest of the version before stays: a backup in doubt about the update may send that state back.
        self._expected = {} if before is None else {step - 1: before}

    def verify(self, step: int) -> None:
        """Make the update of `step` the state: it equals the primary's."""
        self._digest = self._updates.pop(step)
        del self._expected[step]
        self._version, self._is_copy, self._published = step, False, None
        self._kept.pop(step, None)

    def replace(self, step: int, digest: int) -> None:
        """Replace the record by that of a copy of the primary's state after `step`."""
        # A copy equals its primary's state, right or wrong. It can follow, but it cannot be a witness.
        self._version, self._is_copy, self._digest, self._published = step, True, digest, None
        self._kept.clear()
        self._updates.clear()
        self._expected.clear()

    def note_digest(self, digest: int) -> None:
        """Keep the digest of a state that was made just now. Copies of it and later digests are compared with this."""
        self._digest = digest

    def announce(self, digest: int | None, published: int | None) -> bool:
        """Keep the digests of state and parameters that are about to be announced. None: it was not computed.

        Returns False if one of them differs from the digest that was kept before.
        """
        before = self._digest, self._published
        self._digest = self._digest if digest is None else digest
        self._published = self._published if published is None else published
        return all(old in (None, new) for old, new in zip(before, (self._digest, self._published), strict=True))

    # --------------------------------------------------------------------------------------------------- gradients

    def keep(self, step: int, gradient: FinishedGradient) -> None:
        """Keep the finished gradient of `step` for this backup's update."""
        self._kept[step] = gradient

    def void(self, step: int) -> None:
        """Drop the finished gradient of `step`. No acknowledgement of it is owed any more."""
        self._kept.pop(step, None)
        self._owed.pop(step, None)

    def owe(self, step: int, primary: str) -> None:
        """Note that the primary waits for an acknowledgement of the gradient of `step`."""
        self._owed[step] = primary

    def acknowledge(self, step: int) -> str | None:
        """Return the primary that is owed the acknowledgement of `step`, once it may be sent. Each is returned once."""
        # From the verified state of the step before and the gradient, this backup can make the update. From an older
        # state it could not.
        return self._owed.pop(step, None) if self._version == step - 1 else None

    def forget_view(self) -> None:
        """Forget the primaries that wait for an acknowledgement."""
        self._owed.clear()

    # ------------------------------------------------------------------------------- updates, before they are verified

    def update(self, step: int, digest: int) -> None:
        """Note the digest of this backup's update of `step`."""
        self._updates[step] = digest

    def update_of(self, step: int) -> int | None:
        """Return the digest of this backup's update of `step`, or None if there is none that is not verified."""
        return self._updates.get(step)

    def expect(self, step: int, digest: int, primary: str) -> None:
        """Note the digest of the primary's update of `step`."""
        self._expected[step], self._primary = digest, primary

    def expected_of(self, step: int) -> int | None:
        """Return the digest of the primary's state after `step`, or None if it is not kept."""
        return self._expected.get(step)

    def is_comparable(self, step: int) -> bool:
        """Return True if this backup's update and the primary's digest are here, and no doubt is open."""
        return self._difference is None and step in self._updates and step in self._expected

    def doubt(self, shard: int, step: int, member: str) -> None:
        """Open a doubt about the update of `step`, which differs from the primary's. All is noted for the verdict."""
        # It is noted now, because a second update overwrites the first.
        told, found = self._expected[step], self._updates[step]
        self._difference = Difference(
            shard=shard, step=step, member=member, primary=self._primary, told=told, found=found
        )

    def settle(self) -> None:
        """Close the doubt: it is known which side is wrong."""
        self._difference = None


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
        """Forget the acknowledgements that are owed: in the next view the gradients are sent again."""
        for held in self._held.values():
            held.forget_view()

    def why_not_yet(self) -> str:
        """Keep all states as they are until it is known which side is wrong."""
        doubts = self.in_doubt()
        return f"it is not known yet which copy of shard {doubts[0]} is wrong" if doubts else ""

    def void_step(self, step: int) -> None:
        """Drop the finished gradients of this step, because it begins anew."""
        for held in self._held.values():
            held.void(step)

    def change_role(self, me: str, shard: int, before: Holders, after: Holders) -> None:
        """Follow a commit that has changed the shard's holders."""
        if me == before.primary != after.primary and me in after.backups:
            self.unbind([shard])
        # A follower was not a holder before: its copy stays.
        if me in before.all and me not in after.all:
            self._leaving.add(shard)

    def bind(self, shards: Iterable[int]) -> None:
        """Note that these states work on the model's memory, because this member is their primary."""
        self.bound.update(shards)

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
