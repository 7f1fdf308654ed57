"""Block graphs for tests that need no model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastrain.pipeline.graph import BlockGraph, IllegalCut


def graph_of(flops: Sequence[int], illegal: Iterable[int] = ()) -> BlockGraph:
    """Blocks `b0`, `b1`, … of so many FLOPs each; nothing is said of what crosses the cuts."""
    return BlockGraph(
        blocks=tuple(f"b{i}" for i in range(len(flops))),
        flops=tuple(flops),
        crossings=((),) * (len(flops) + 1),
        illegal=tuple(IllegalCut(cut=cut, why="the test says so") for cut in sorted(illegal)),
    )
