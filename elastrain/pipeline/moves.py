"""What changes hands between two plans. A move is a publish to one more member, in the commit that brings the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastrain.pipeline.plan import PipelinePlan, held


@dataclass(frozen=True, kw_only=True)
class BlockMoves:
    """Blocks by member; members without any are left out."""

    gained: Mapping[str, tuple[int, ...]]
    """What a member has to be sent before it computes by the new plan."""
    dropped: Mapping[str, tuple[int, ...]]
    """What a member lets go of, once the record of the new plan is there."""

    @property
    def count(self) -> int:
        return sum(map(len, self.gained.values()))

    @property
    def reason(self) -> str:
        if not self.count:
            return "no block moves"
        each = ", ".join(f"{len(blocks)} to {member}" for member, blocks in self.gained.items())
        return f"{self.count} blocks move ({each})"


def moves(has: Mapping[str, frozenset[int]], plan: PipelinePlan) -> BlockMoves:
    """Find what has to change hands, so that each member of `plan` has its blocks. `has`: what the living ones have."""
    # Who gives is not said: the holders of a block's shards publish all its parameters in every step anyway.
    wanted = held(plan)
    gained = {m: tuple(sorted(wanted[m] - has.get(m, frozenset()))) for m in wanted}
    # A member that is in no pipeline any more lets go of everything.
    dropped = {m: tuple(sorted(blocks - wanted.get(m, frozenset()))) for m, blocks in has.items()}
    return BlockMoves(
        gained={m: blocks for m, blocks in gained.items() if blocks},
        dropped={m: blocks for m, blocks in dropped.items() if blocks},
    )
