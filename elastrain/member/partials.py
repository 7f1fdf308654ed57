"""Partial sums along the tree of the fold, with what travels with each: pure bookkeeping, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.fold import Combine, Fold, Node, absorb, is_covered
from elastrain.values import Contribution

Weight = tuple[Contribution, int]
"""What travels with a partial: its contribution, and the bit mask of leaves that got a gradient."""


def join_weights(left: Weight, right: Weight) -> Weight:
    # A leaf that any run has touched has a gradient, however many runs have not.
    return left[0] + right[0], left[1] | right[1]


@dataclass(frozen=True)
class FinishedGradient:
    """A shard's gradient over the whole step, as its primary has it."""

    contribution: Contribution
    touched: tuple[int, ...]
    square_norm: float


class PartialSet:
    """Partials of one block (own) or of one shard's lane (a primary's), with what travels with each."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self.nodes: frozenset[Node] = frozenset()
        self._weights: dict[Node, Weight] = {}

    def add(self, node: Node, weight: Weight, within: Node | None = None) -> list[Combine] | None:
        """The additions that follow, in order; None if the partial was covered already."""
        # Weights are joined where gradients are added: what a lost member contributed arrives whole or not at all.
        if is_covered(node, self.nodes):
            return None
        self._weights[node] = weight
        self.nodes, steps = absorb(self._fold, self.nodes, node, within)
        for step in steps:
            self._weights[step.parent] = join_weights(self._weights[step.left], self._weights[step.right])
        return steps

    def weight(self, node: Node) -> Weight:
        return self._weights[node]

    @property
    def complete(self) -> bool:
        return self._fold.root in self.nodes
