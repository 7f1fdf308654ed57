"""Decisions about durable checkpoints: which committed steps become one, and which holders write it. Pure.

All members decide alike, because the decision is part of the commit record, which all combine from the same votes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from elastrain.job.placement import Holders, Placement

LOOP = -1
"""Value in place of a shard's index: the training loop's state. On local disks it is written on every node."""


class Wish(IntEnum):
    """A member's wish for a checkpoint, in its vote. The highest wish of all members counts."""

    NONE = 0
    DUE = 1
    """This step is due by its number. If it cannot become a checkpoint, the next due step may."""
    WANTED = 2
    """A checkpoint was requested. The wish stays until a step has become a checkpoint."""
    LAST = 3
    """The job is about to be stopped, and no step is to follow."""


@dataclass(frozen=True)
class CheckpointVote:
    """The part of a member's vote that is about checkpoints."""

    wish: Wish = Wish.NONE
    is_writing: bool = False
    """True if this member takes part in a checkpoint that is not complete yet."""


class Checkpointed(IntEnum):
    """The decision about a step's checkpoint, in its commit record."""

    NO = 0
    TAKEN = 1
    LAST = 2
    """The step becomes a checkpoint, and no step follows in this view."""
    PASSED_OVER = 3
    """A checkpoint was due, but an earlier one is still being written."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlan:
    """Settings of this member. They may differ between members, because the votes of all decide."""

    every_steps: int = 0
    """Steps between two checkpoints; 0: none is due by its number."""
    all_holders: bool = False
    """True if every holder writes its copy, since others cannot read its disk. Else each shard is written once."""


def decide(wishes: Collection[Wish], *, writing: bool) -> Checkpointed:
    """Decide if the step becomes a checkpoint. `writing`: a member still writes an earlier one."""
    wish = max(wishes, default=Wish.NONE)
    # One at a time, so that the copies being written take bounded memory, however slow the disk is.
    if writing:
        # Only a wish by number ends with its step. A requested checkpoint stays wished.
        return Checkpointed.PASSED_OVER if wish is Wish.DUE else Checkpointed.NO
    if wish is Wish.LAST:
        return Checkpointed.LAST
    return Checkpointed.TAKEN if wish is not Wish.NONE else Checkpointed.NO


def steady(before: Placement, after: Placement) -> Placement:
    """Return the holders that keep their places in a commit. The old primary always stays one of them."""
    # A member whose role begins or ends now may drop the state before it is verified. The primary has it at once.
    return tuple(
        Holders(old.primary, tuple(member for member in old.backups if member in new.backups))
        for old, new in zip(before, after, strict=True)
    )


def writers(holders: Placement, sizes: Sequence[int], *, all_holders: bool) -> frozenset[tuple[str, int]]:
    """Return the pairs (member, shard) that are to be written.

    sizes: bytes per shard.
    """
    # A node's disk can be lost with its node, so each copy may be the only one left to resume from.
    if all_holders:
        return frozenset((member, shard) for shard, each in enumerate(holders) for member in each.all)
    return frozenset(balanced(range(len(sizes)), holders, sizes))


def keepers(named: Collection[tuple[str, int]], nodes: Mapping[str, str]) -> frozenset[str]:
    """Choose one writer on each node. On local disks it writes the loop's state and keeps the manifest.

    nodes: living member -> node.
    """
    # Only among writers, whom all members name alike: a member that joined since knows nothing of this checkpoint.
    first: dict[str, str] = {}
    for member in sorted({member for member, _ in named if member in nodes}):
        first.setdefault(nodes[member], member)
    return frozenset(first.values())


def balanced(shards: Iterable[int], holders: Placement, sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Choose one writer for each of these shards, so that all write about the same number of bytes."""
    load: dict[str, int] = {}
    chosen: list[tuple[str, int]] = []
    # The largest first, so that the small ones even out what remains unequal.
    for shard in sorted(shards, key=lambda s: (-sizes[s], s)):
        # A backup replaces its state and never changes it in place: writing it needs no copy and no waiting.
        candidates = holders[shard].backups or (holders[shard].primary,)
        writer = min(candidates, key=lambda member: load.get(member, 0))
        load[writer] = load.get(writer, 0) + sizes[shard]
        chosen.append((writer, shard))
    return chosen
