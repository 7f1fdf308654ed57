"""Describes the fixed summation tree over the runs of a step, and sets of partial sums over it.

A *run* is `c` consecutive micro-batches, summed in order and in place; above the runs the tree is binary. A node is the
half-open interval `(start, stop)` of runs below it, so two partials are nested or disjoint. A node splits at the
largest power of two below its length.

Floating-point addition depends on its order: this tree is that order, whoever computes what. Only intervals live here;
the numbers that they stand for live with the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from elastrain.base.arithmetic import split_at

Node = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Combine:
    """The order to add `parent := left + right`, with the left one first. The children are used up."""

    left: Node
    right: Node
    parent: Node


def split(node: Node) -> tuple[Node, Node]:
    """The two children of an inner node. Raises ValueError for a leaf."""
    start, stop = node
    if stop - start < 2:
        raise ValueError(f"run {start} is a leaf of the fold and has no children")
    middle = split_at(start, stop)
    return (start, middle), (middle, stop)


def covers(outer: Node, inner: Node) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def overlap(one: Node, other: Node) -> bool:
    """Tell whether two nodes have a run in common; then one covers the other."""
    return one[0] < other[1] and other[0] < one[1]


def is_covered(node: Node, nodes: Iterable[Node]) -> bool:
    return any(covers(have, node) for have in nodes)


@dataclass(frozen=True)
class Fold:
    """A tree over `runs` leaves."""

    runs: int

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"a step has at least one run; got {self.runs}")

    # A gradient is finished exactly when this node is there.
    @property
    def root(self) -> Node:
        return (0, self.runs)

    def parent(self, node: Node) -> tuple[Node, Node, Node]:
        """Find `(left, right, parent)`, of which `node` is a child. Raises ValueError for the root."""
        return _family(self.runs, node)

    def cover(self, runs: Iterable[int]) -> tuple[Node, ...]:
        """Find the fewest nodes that together hold exactly these runs, in order."""
        # A member's share is sent as these nodes: the fewer, the more was added before anything travels.
        wanted = frozenset(runs)
        found: list[Node] = []
        self._cover(self.root, wanted, found)
        return tuple(found)

    def _cover(self, node: Node, wanted: frozenset[int], found: list[Node]) -> None:
        # From above, so that a node that is wholly wanted is found before its children are looked at.
        inside = sum(1 for run in range(*node) if run in wanted)
        if inside == node[1] - node[0]:
            found.append(node)
        elif inside:
            for child in split(node):
                self._cover(child, wanted, found)


@cache  # asked for each lane of each partial; a job has one tree of at most a few thousand nodes
def _family(runs: int, node: Node) -> tuple[Node, Node, Node]:
    here = (0, runs)
    while here != node:
        left, right = split(here)
        if node in (left, right):
            return left, right, here
        here = left if covers(left, node) else right
    raise ValueError(f"{node} is the root of the fold")


def absorb(
    fold: Fold, held: frozenset[Node], node: Node, within: Node | None = None
) -> tuple[frozenset[Node], list[Combine]]:
    """Add the partial `node` to the set `held`, and combine siblings upwards as far as `within` (by default the root).

    Returns the new set and the additions to carry out, in order. Afterwards the set is disjoint, and no two siblings
    below `within` are left apart.
    """
    limit = within or fold.root
    # The same partial may come twice, from its maker and from a survivor that computed it again: the bits are equal,
    # and counting them twice is the mistake that this line prevents.
    if is_covered(node, held):
        return held, []
    # A parent replaces its children: it was made of the same runs, by somebody who had both.
    nodes = {have for have in held if not covers(node, have)} | {node}
    steps: list[Combine] = []
    while node != limit:
        left, right, parent = fold.parent(node)
        if left not in nodes or right not in nodes:
            break
        steps.append(Combine(left=left, right=right, parent=parent))
        nodes -= {left, right}
        nodes.add(parent)
        node = parent
    return frozenset(nodes), steps


def leaves(nodes: Iterable[Node]) -> frozenset[int]:
    """Collect all runs below these nodes."""
    return frozenset(run for node in nodes for run in range(*node))
