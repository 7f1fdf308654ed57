"""The block graph: blocks in the order in which a forward enters them, tensors that cross each cut, and legal cuts.

It is a function of the model and of one micro-batch, never of the members. Plans rest on it, so members compare it when
they join (`BlockGraph.digest`). The tracing pass in `stubs/` records it. Pure: only names and numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import prod

from elastrain.errors import ConfigError, CutError


@dataclass(frozen=True, kw_only=True)
class CrossingTensor:
    """The description of one tensor that crosses a cut: sizes and strides in elements, dtype by torch's name."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    itemsize: int
    """Bytes of one element."""
    requires_grad: bool

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class IllegalCut:
    """A cut at which no member may begin. `why` is a clause for the sentence that the user reads."""

    cut: int
    why: str


@dataclass(frozen=True, kw_only=True)
class BlockGraph:
    """The blocks in the order in which a forward first enters them. A cut `p` lies before the p-th of them."""

    blocks: tuple[str, ...]
    # Integers, so that sums and comparisons are the same on every member.
    flops: tuple[int, ...]
    """FLOPs of each block's forward for one micro-batch."""
    crossings: tuple[tuple[CrossingTensor, ...], ...]
    """By cut, `0..n`: the tensors that cross it, in order of first appearance. Nothing crosses the first and the last
    cut.
    """
    illegal: tuple[IllegalCut, ...] = ()
    never_entered: tuple[tuple[str, str], ...] = ()
    """(block, neighbour): blocks that no forward of this micro-batch enters, and the block that each one stays with."""

    def __post_init__(self) -> None:
        # A graph with a missing number would silently give wrong plans.
        n = len(self.blocks)
        if not n or len(self.flops) != n or len(self.crossings) != n + 1:
            raise ValueError(
                f"a graph has blocks, FLOPs of each and one crossing more; got {n} blocks, {len(self.flops)} numbers "
                f"of FLOPs and {len(self.crossings)} crossings"
            )

    @cached_property
    def legal_cuts(self) -> tuple[int, ...]:
        """The cuts between two blocks at which one member may end and another begin, ascending."""
        illegal = {each.cut for each in self.illegal}
        return tuple(cut for cut in range(1, len(self.blocks)) if cut not in illegal)

    @cached_property
    def points(self) -> tuple[int, ...]:
        """The legal cuts with both ends of the model: `0`, …, `n`."""
        return (0, *self.legal_cuts, len(self.blocks))

    @cached_property
    def units(self) -> tuple[tuple[int, int], ...]:
        """The stretches between neighbouring legal cuts, in order. One member always computes a unit as a whole."""
        return tuple(pairwise(self.points))

    def cost(self, begin: int, end: int) -> int:
        """Return the FLOPs of the forward of the blocks `[begin, end)`."""
        return self._cumulated[end] - self._cumulated[begin]

    @cached_property
    def _cumulated(self) -> tuple[int, ...]:
        # Cached, because a search for cuts asks for the cost of every stretch.
        sums = [0]
        for flops in self.flops:
            sums.append(sums[-1] + flops)
        return tuple(sums)

    def digest(self) -> str:
        """Return 32 hexadecimal digits over everything that is the same for all micro-batches and steps.

        Shapes and FLOPs are left out, because a newcomer traces another micro-batch.
        """
        crossings = [[tensor.dtype for tensor in crossing] for crossing in self.crossings]
        text = json.dumps((self.blocks, crossings, [(x.cut, x.why) for x in self.illegal], self.never_entered))
        return blake2b(text.encode(), digest_size=16, person=b"elastrain-graph").hexdigest()

    def difference(self, other: BlockGraph) -> str | None:
        """Say in one sentence how this graph differs from another member's, or return None if they are equal."""
        if self == other:
            return None
        # Blocks are compared first: all later fields are in their order, and would differ for that reason alone.
        for mine, theirs in zip(self.blocks, other.blocks, strict=False):
            if mine != theirs:
                return f"one forward enters block {mine!r} where the other enters {theirs!r}"
        if len(self.blocks) != len(other.blocks):
            return f"one forward enters {len(self.blocks)} blocks, the other {len(other.blocks)}"
        for cut, (mine_crosses, theirs_crosses) in enumerate(zip(self.crossings, other.crossings, strict=True)):
            if mine_crosses != theirs_crosses:
                return f"other tensors cross the cut before block {self.blocks[cut]!r}"
        if self.illegal != other.illegal:
            return f"the legal cuts are {_listed(self)} in one and {_listed(other)} in the other"
        return "the FLOPs of their blocks differ, or which blocks are never entered"


def check_stages(graph: BlockGraph, stages: int) -> None:
    """Raise CutError if no pipeline of the model can have `stages` members, and ConfigError if `stages` is below 1."""
    # Called before any plan is made: with too few legal cuts the search has no solution.
    if stages < 1:
        raise ConfigError(f"stages must be at least 1; got {stages}")
    if stages > len(graph.units):
        cuts = "1 cut" if stages == 2 else f"{stages - 1} cuts"
        raise CutError(f"stages={stages} asks for {cuts}, and {_allowed(graph)}: {_advice(graph)}")


def uncut(graph: BlockGraph) -> str:
    """Return the sentence for `--stages auto` if no cut is legal, else ""."""
    if graph.legal_cuts:
        return ""
    why = "name smaller blocks"
    if graph.illegal:
        first = graph.illegal[0]
        why = f"mend what forbids cuts (before block {graph.blocks[first.cut]!r}: {first.why})"
    return f"--stages auto: no cut of this model is legal, so every member computes the whole model; to cut it, {why}"


def _allowed(graph: BlockGraph) -> str:
    if not graph.legal_cuts:
        return "no cut of this model is legal"
    return f"this model has {len(graph.legal_cuts)} legal: {_listed(graph)}"


def _advice(graph: BlockGraph) -> str:
    fits = f"ask for at most {len(graph.units)}" if graph.legal_cuts else "leave stages out"
    if not graph.illegal:
        return f"{fits}, or name smaller blocks"
    # One reason is enough: the user who removes it sees the next one.
    first = graph.illegal[0]
    return f"{fits}, or mend what forbids the others (before block {graph.blocks[first.cut]!r}: {first.why})"


def _listed(graph: BlockGraph) -> str:
    return ", ".join(f"before {graph.blocks[cut]!r}" for cut in graph.legal_cuts) or "none"
