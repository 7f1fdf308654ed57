"""Decides which committed steps become durable checkpoints, and which holders write them: functions of values.

All members come to the same decision, because it is part of the commit record, which all combine from the same votes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elastrain.job.placement import Holders, Placement

LOOP = -1
"""In the place of a shard: the training loop's state, which on local disks is written on every node."""


class Wish(IntEnum):
    """What a member says of a checkpoint in its vote; the higher counts."""

    NONE = 0
    DUE = 1
    """This step is one of those that become a checkpoint: where it cannot, the next such step is as good."""
    WANTED = 2
    """Somebody has asked for one: the wish stays until a step has become a checkpoint."""
    LAST = 3
    """The job is about to be stopped: no step is to follow."""


class Checkpointed(IntEnum):
    """What a commit record says of its step."""

    NO = 0
    TAKEN = 1
    LAST = 2
    """Taken, and no step follows in this view."""
    PASSED_OVER = 3
    """It was due, but an earlier checkpoint is still being written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """What this member was started with. Members of one job may differ: what counts are the votes of all."""

    every_steps: int = 0
    """Every so many steps one is due; 0: none is by its number."""
    all_holders: bool = False
    """Every holder writes its copy, since others cannot read its disk; else each shard is written once."""


def decide(wishes: Collection[Wish], *, writing: bool) -> Checkpointed:
    """Say whether the step becomes a checkpoint. `writing`: some member has part in one that is not complete."""
    wish = max(wishes, default=Wish.NONE)
    # One at a time: the memory of the copies that are being written stays bounded, whatever the disk does.
    if writing:
        # Only a wish by number is gone with its step: what somebody has asked for stays wished.
        return Checkpointed.PASSED_OVER if wish is Wish.DUE else Checkpointed.NO
    if wish is Wish.LAST:
        return Checkpointed.LAST
    return Checkpointed.TAKEN if wish is not Wish.NONE else Checkpointed.NO


def steady(before: Placement, after: Placement) -> Placement:
    """Holders that a commit leaves in their places; the primary of before stays whatever the commit makes of it."""
    # Whose role has just begun or ended may drop the state before it is verified; the primary has it at once.
    return tuple(
        Holders(old.primary, tuple(member for member in old.backups if member in new.backups))
        for old, new in zip(before, after, strict=True)
    )


def writers(holders: Placement, sizes: Sequence[int], *, all_holders: bool) -> frozenset[tuple[str, int]]:
    """Name who writes what, as (member, shard).

    sizes: bytes per shard.
    """
    # A node's disk can be lost with its node: each copy may be the only one that is left to go on from.
    if all_holders:
        return frozenset((member, shard) for shard, each in enumerate(holders) for member in each.all)
    return frozenset(balanced(range(len(sizes)), holders, sizes))


def keepers(named: Collection[tuple[str, int]], nodes: Mapping[str, str]) -> frozenset[str]:
    """Name one of the writers on each node: where disks are local, it writes the loop's state and keeps the manifest.

    nodes: member -> node, of those that live.
    """
    # Of writers alone, which all members name alike: one that came meanwhile knows nothing of this checkpoint.
    first: dict[str, str] = {}
    for member in sorted({member for member, _ in named if member in nodes}):
        first.setdefault(nodes[member], member)
    return frozenset(first.values())


def balanced(shards: Iterable[int], holders: Placement, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """One writer for each of these shards."""
    load: dict[str, int] = {}
    chosen: list[tuple[str, int]] = []
    # The largest first, so that the small ones even out what these leave unequal.
    for shard in sorted(shards, key=lambda s: (-sizes[s], s)):
        # A backup's state is replaced by its next one, never changed in place: writing it costs no copy and no wait.
        candidates = holders[shard].backups or (holders[shard].primary,)
        writer = min(candidates, key=lambda member: load.get(member, 0))
        load[writer] = load.get(writer, 0) + sizes[shard]
        chosen.append((writer, shard))
    return chosen
