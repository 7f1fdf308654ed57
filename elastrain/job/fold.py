"""The fixed summation tree over the runs of a step, and sets of partial sums over it.

A *run* is `c` consecutive micro-batches, summed in order and in place. Above the runs the tree is binary. A node is the
half-open interval `(start, stop)` of the runs below it, so two nodes are nested or disjoint. A node splits at the
largest power of two below its length. Floating-point addition depends on its order: this tree is that order, whichever
member computes. Only intervals live here; the caller has the numbers that they stand for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from elastrain.base.arithmetic import split_at

Node = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Combine:
    """A command to add `parent := left + right`, with the left one first. The children are used up."""

    left: Node
    right: Node
    parent: Node


def split(node: Node) -> tuple[Node, Node]:
    """Return the two children of an inner node. Raises ValueError for a leaf."""
    start, stop = node
    if stop - start < 2:
        raise ValueError(f"run {start} is a leaf of the fold and has no children")
    middle = split_at(start, stop)
    return (start, middle), (middle, stop)


def covers(outer: Node, inner: Node) -> bool:
    """Return True if `inner` lies within `outer`."""
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def overlap(one: Node, other: Node) -> bool:
    """Return True if two nodes have a run in common. Then one covers the other."""
    return one[0] < other[1] and other[0] < one[1]


def is_covered(node: Node, nodes: Iterable[Node]) -> bool:
    """Return True if one of `nodes` covers `node`."""
    return any(covers(have, node) for have in nodes)


@dataclass(frozen=True)
class Fold:
    """A summation tree over `runs` leaves."""

    runs: int

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise ValueError(f"a step has at least one run; got {self.runs}")

    @property
    def root(self) -> Node:
        """The node over all runs. The gradient is finished when this partial exists."""
        return (0, self.runs)

    def parent(self, node: Node) -> tuple[Node, Node, Node]:
        """Return `(left, right, parent)`, of which `node` is a child. Raises ValueError for the root."""
        return _family(self.runs, node)

    def cover(self, runs: Iterable[int]) -> tuple[Node, ...]:
        """Return the fewest nodes that together hold exactly these runs, in order."""
        # A member sends its share as these nodes. Fewer nodes mean that more was added before sending.
        wanted = frozenset(runs)
        found: list[Node] = []
        self._cover(self.root, wanted, found)
        return tuple(found)

    def _cover(self, node: Node, wanted: frozenset[int], found: list[Node]) -> None:
        # From above: a node whose runs are all wanted is found before its children are looked at.
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
    # The same partial may come twice: from its maker, and from a survivor that computed it again. The bits are equal,
    # and this line prevents that they are counted twice.
    if is_covered(node, held):
        return held, []
    # A parent replaces its children, because it is the sum of the same runs.
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
    """Return all runs below these nodes."""
    return frozenset(run for node in nodes for run in range(*node))
