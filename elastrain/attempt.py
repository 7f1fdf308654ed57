"""One try at a step: what this member computes, what it folds for its shards, who has acknowledged and voted.

Plain bookkeeping without I/O; the decisions that use it are in lifecycle.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastrain.fold import Combine, Fold, Node, absorb, covers, is_covered, leaves
from elastrain.values import Check, Contribution, Vote

Weight = tuple[Contribution, int]
"""What travels with a partial: its contribution, and the bit mask of leaves that got a gradient."""


def join_weights(left: Weight, right: Weight) -> Weight:
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


@dataclass
class Attempt:
    """Step `step`, tried in one or more views; survivors' partials stay valid across views."""

    step: int
    fold: Fold
    blocks: int
    pending: list[int] = field(default_factory=list)
    running: int | None = None
    ended: set[int] = field(default_factory=set)
    targets: tuple[Node, ...] = ()
    own: list[PartialSet] = field(default_factory=list)
    sent: set[tuple[int, Node]] = field(default_factory=set)
    folds: dict[tuple[int, int], PartialSet] = field(default_factory=dict)
    finished: dict[int, FinishedGradient] = field(default_factory=dict)
    acks: dict[int, set[str]] = field(default_factory=dict)
    votes: dict[str, Vote] = field(default_factory=dict)
    voted: bool = False
    probes: dict[str, int] = field(default_factory=dict)
    """Member -> its run whose first micro-batch a neighbour computes, too."""
    recomputes: int = 0
    """How often this member still has to compute a neighbour's."""
    awaited: set[int] = field(default_factory=set)
    """Runs of such micro-batches that the training loop is at."""
    checks: dict[int, Check] = field(default_factory=dict)
    """Run -> what came out here of its first micro-batch."""

    def __post_init__(self) -> None:
        self.own = [PartialSet(self.fold) for _ in range(self.blocks)]

    def hand(self, runs: Sequence[int]) -> None:
        """Replace what is still to do. Targets that lose a run shrink; new runs make targets of their own.

        A target that was sent for any block is complete and loses nothing, so what was sent is never changed. Runs that
        ended here meanwhile are not done again.
        """
        runs = [run for run in runs if run not in self.ended]
        taken = set(self.pending) - set(runs)
        given = set(runs) - set(self.pending)
        kept: list[Node] = []
        for target in self.targets:
            if taken & leaves([target]):
                kept.extend(self.fold.cover(leaves([target]) - taken))
            else:
                kept.append(target)
        self.targets = (*kept, *self.fold.cover(given))
        self.pending = runs

    def end(self, run: int) -> None:
        self.ended.add(run)
        self.running = None
        if run in self.pending:
            self.pending.remove(run)

    def target_of(self, run: int) -> Node:
        return next(target for target in self.targets if covers(target, (run, run + 1)))

    def unsent(self) -> Iterable[tuple[int, Node]]:
        """(block, target) that are complete here and have not been delivered."""
        for block, partials in enumerate(self.own):
            for target in self.targets:
                if target in partials.nodes and (block, target) not in self.sent:
                    yield block, target

    def fold_of(self, shard: int, lane: int) -> PartialSet:
        return self.folds.setdefault((shard, lane), PartialSet(self.fold))

    def forget_view(self) -> None:
        """Votes and acknowledgements belong to one view."""
        self.votes.clear()
        self.acks.clear()
        self.voted = False
