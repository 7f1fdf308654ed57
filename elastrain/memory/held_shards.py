"""The shards that a member holds, their bytes in each of its memories, and the choice of those that leave. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from elastrain.job.placement import Placement

SCRATCH_PART = 8
"""A device scales a primary's gradients in parts of 1/SCRATCH_PART."""


class MemoryKind(StrEnum):
    """One of the memories that a member has, by the name that sentences give it."""

    ONE = "memory"
    """The memory of a job on the CPU, which computes and holds everything."""
    DEVICE = "device memory"
    HOST = "host memory"
    """The host's memory in a job on a device. Backups and what travels lie there."""


def sums_needed(members: int) -> int:
    """Count the buffers per shard while a primary adds the partials of `members` members along the tree."""
    # One per level: of two siblings the left one waits for the right one.
    return max(1, (members - 1).bit_length())


@dataclass(frozen=True, kw_only=True)
class Held:
    """A shard that a member holds. `leaves_bytes` is the memory that is freed if its state is kept on disk."""

    shard: int
    is_primary: bool
    gradient_bytes: int
    leaves_bytes: int
    primary_bytes: int = field(default=0, compare=False)
    """Part of its state that a primary has, beside the model's parameters."""
    backup_bytes: int = field(default=0, compare=False)
    """Part of its state that a backup has."""

    def on(self, memory: MemoryKind) -> Held | None:
        """Return the part of the shard that lies in one memory of a member, or None if no part does."""
        if memory == MemoryKind.DEVICE:
            return replace(self, leaves_bytes=self.primary_bytes) if self.is_primary else None
        if memory == MemoryKind.HOST:
            return replace(self, leaves_bytes=self.backup_bytes, is_primary=False) if self.backup_bytes else None
        return self


def held_by(
    member: str,
    placements: Iterable[Placement],
    sizes: Sequence[int],
    *,
    moments: float | Sequence[float],
    masters: bool = False,
    frozen: Collection[int] = (),
) -> tuple[Held, ...]:
    """List the shards that `member` holds in any of these placements: the present one, and those to come.

    moments: size of the optimizer's own state, in units of the parameters': for all shards, or for each.
    masters: True if primaries keep masters.
    frozen: shards that get no gradients.
    """
    more = moments if isinstance(moments, Sequence) else [moments] * len(sizes)
    # A primary uses the model's parameters, unless it keeps masters. A backup has parameters of its own, and a second
    # state while an update is not verified.
    primary: set[int] = set()
    backup: set[int] = set()
    for placement in placements:
        primary |= {shard for shard, holders in enumerate(placement) if holders.primary == member}
        backup |= {shard for shard, holders in enumerate(placement) if member in holders.backups}
    return tuple(
        Held(
            shard=shard,
            is_primary=shard in primary,
            gradient_bytes=0 if shard in frozen else sizes[shard],
            leaves_bytes=round(sizes[shard] * (2 * (1 + more[shard]) if shard in backup else more[shard] + masters)),
            primary_bytes=round(sizes[shard] * (more[shard] + masters)) if shard in primary else 0,
            backup_bytes=round(sizes[shard] * 2 * (1 + more[shard])) if shard in backup else 0,
        )
        for shard in sorted(primary | backup)
    )


def sums_bytes(held: Sequence[Held], makers: int, behind_bytes: int) -> int:
    """Count the memory for gradients besides a member's slots. `held`: its shards.

    A primary has sums of the partials of `makers` members, and scratch of updates. A backup has kept gradients of two
    steps, since the next step's may come before it has verified an update. Its scratch for the `behind_bytes` that are
    updated in one go is the same memory.
    """
    primary_bytes = sum(each.gradient_bytes for each in held if each.is_primary)
    backup_bytes = sum(each.gradient_bytes for each in held if not each.is_primary)
    scratch_bytes = max(primary_bytes, min(behind_bytes, backup_bytes))
    return sums_needed(makers) * primary_bytes + 2 * backup_bytes + scratch_bytes


def device_sums_bytes(held: Sequence[Held], makers: int) -> int:
    """Count the same on a device, which has no kept gradients. Its scratch of updates is a part of the gradients.

    held: shards in both memories. The update of a backup brings its state and gradient to the device, one at a time.
    """
    primary = [each.gradient_bytes for each in held if each.is_primary]
    scratch_bytes = max(sum(primary) // SCRATCH_PART, max(primary, default=0))
    passing_bytes = max((each.backup_bytes // 2 + each.gradient_bytes for each in held if each.backup_bytes), default=0)
    return sums_needed(makers) * sum(primary) + max(scratch_bytes, passing_bytes)


def kept_gradients_bytes(held: Sequence[Held]) -> int:
    """Count the gradients that a backup keeps in host memory in a job on a device: those of two steps."""
    return 2 * sum(each.gradient_bytes for each in held if each.backup_bytes)


def shards_bytes(held: Sequence[Held]) -> tuple[int, int]:
    """Count the bytes of all states that a member holds, and those in memory while all states are kept on disk."""
    largest_bytes = max((each.leaves_bytes for each in held), default=0)
    total_bytes = sum(each.leaves_bytes for each in held)
    # One is updated while the one before it is still being written.
    return total_bytes, min(total_bytes, 2 * largest_bytes)


def choose_shards(held: Iterable[Held], wanted_bytes: int) -> tuple[frozenset[int], str]:
    """Choose the shards whose states move to disk so that `wanted_bytes` leave memory.

    Returns them, and a description.
    """
    # Backups first, because no step waits for them. Then the largest, so that few shards are affected.
    chosen: set[int] = set()
    backups = 0
    for each in sorted(held, key=lambda h: (h.is_primary, -h.leaves_bytes, h.shard)):
        if wanted_bytes <= 0:
            break
        # A primary whose optimizer has no state, such as plain SGD, would free nothing: its shard stays.
        if each.leaves_bytes:
            chosen.add(each.shard)
            backups += not each.is_primary
            wanted_bytes -= each.leaves_bytes
    return frozenset(chosen), f"{backups} shards held as a backup and {len(chosen) - backups} as primary are on disk"
