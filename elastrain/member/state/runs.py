"""What this member computes of the open step: the runs handed to it, and the partials that came of them.

Partial sums along the tree of the fold, with what travels with each: pure bookkeeping, no tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastrain.job.fold import Combine, Fold, Node, absorb, covers, is_covered, leaves
from elastrain.job.values import Contribution
from elastrain.member.contract import MemberPart

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


class Runs(MemberPart):
    """Owns the hand-out of step `step`, tried in one or more views: own partials stay valid across views."""

    def __init__(self, fold: Fold, blocks: int, first: int) -> None:
        self.fold = fold
        self._blocks = blocks
        self.is_void = False
        """The training loop is at something that was handed out before the step began anew."""
        self.begin(first)

    def begin(self, step: int) -> None:
        """Start anew with a step of which nothing is computed."""
        self.step = step
        self.pending: list[int] = []
        """Runs still to do here, the running one first."""
        self.running: int | None = None
        self.targets: list[tuple[Node, ...]] = [()] * self._blocks
        """Per block, nodes of the fold that this member completes before it sends them."""
        self.own = [PartialSet(self.fold) for _ in range(self._blocks)]
        """Per block, what this member has computed."""
        self.sent: set[tuple[int, Node]] = set()
        """(block, target) that the shards' primaries were told of."""
        self._ended: set[int] = set()

    def void_running(self) -> None:
        """Let what the training loop is computing count for nothing, until it asks for more."""
        # Until it asks, and not by the number of the run: it may be given the same one again at once.
        self.is_void = True

    def hand(self, runs: Sequence[int]) -> None:
        """Replace what is still to do. Targets that lose a run shrink; new runs make targets of their own.

        A target that was sent for any block is complete and loses nothing, so what was sent is never changed. Runs that
        ended here meanwhile are not done again.
        """
        # The decision rests on reports: a run may have ended here after this member had reported.
        runs = [run for run in runs if run not in self._ended]
        taken = set(self.pending) - set(runs)
        given = set(runs) - set(self.pending)
        kept: list[Node] = []
        # Whole runs are of all blocks alike.
        for target in self.targets[0]:
            # It could not be completed here any more, and would never be sent: its parts are sent alone.
            if taken & leaves([target]):
                kept.extend(self.fold.cover(leaves([target]) - taken))
            else:
                kept.append(target)
        self.targets = [(*kept, *self.fold.cover(given))] * self._blocks
        self.pending = runs

    def aim(self, runs_by_block: Mapping[int, Collection[int]]) -> None:
        """Add tasks of pipelines to what is to be done: block -> runs whose gradients are computed besides."""
        # Never taken away again: a task stays with its member as long as that lives.
        for block, runs in runs_by_block.items():
            targets = self.targets[block]
            self.targets[block] = (*targets, *self.fold.cover(set(runs) - leaves(targets)))

    def end_running(self) -> None:
        """Note that the training loop has computed the run that it was given, if it was given one."""
        self.is_void = False
        run, self.running = self.running, None
        if run is not None:
            self._ended.add(run)
            if run in self.pending:
                self.pending.remove(run)

    @property
    def under_way(self) -> int:
        """How many of `pending` may already be under way and cannot be taken away."""
        # One more than what runs: the loop may have been handed the next run by the time the others read this.
        return min(len(self.pending), 1 + (self.running is not None))

    def is_computing(self) -> bool:
        """Whether runs are left to compute here, or none were handed out yet."""
        return bool(self.pending or not self.targets[0])

    def add(self, block: int, run: int, weight: Weight) -> list[Combine]:
        """The additions that follow from one block's gradient of one run; none if it was there already."""
        # Only up to the target: beyond it lie siblings that another member may compute.
        target = next(target for target in self.targets[block] if covers(target, (run, run + 1)))
        return self.own[block].add((run, run + 1), weight, within=target) or []

    def take_unsent(self) -> Iterable[tuple[int, Node]]:
        """(block, target) that are complete here and were not sent yet; they count as sent from now on."""
        # By block, as backward passes them: the last blocks are reduced while the first are still computed.
        for block, partials in enumerate(self.own):
            for target in self.targets[block]:
                if target in partials.nodes and (block, target) not in self.sent:
                    self.sent.add((block, target))
                    yield block, target

    def are_computed(self) -> bool:
        """Whether every block of all that is to be done here has its gradient."""
        # The loop asks for more only after the whole run, its blocks may be complete before.
        runs = [(run, run + 1) for run in self.pending]
        return all(is_covered(run, own.nodes) for own in self.own for run in runs)
