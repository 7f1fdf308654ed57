"""Runs of the open step that this member computes, and the partial sums that result.

Partial sums along the fold's tree, with the data that travels with each. No tensors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from elastrain import protocol as p
from elastrain.job.fold import Combine, Fold, Node, absorb, covers, is_covered, leaves
from elastrain.job.streams import StreamMark
from elastrain.job.values import Contribution
from elastrain.member.contract import MemberPart, handles
from elastrain.pipeline.actions import TaskAction

OUTSTANDING_MOST = 2
"""Largest number of runs that the training loop has submitted to its device and that have not landed.

Each needs a gradient slot. The second one is there so that the device has work while the first one lands.
"""
Weight = tuple[Contribution, int]
"""Data that travels with a partial: its contribution, and the bit mask of leaves that got a gradient."""


def join_weights(left: Weight, right: Weight) -> Weight:
    """Return the data of the sum of two partials."""
    # A leaf has a gradient if any run gave it one.
    return left[0] + right[0], left[1] | right[1]


@dataclass(frozen=True)
class FinishedGradient:
    """Data of a shard's finished gradient over the whole step, as its primary has it."""

    contribution: Contribution
    touched: tuple[int, ...]
    square_norm: float


class PartialSet:
    """Partial sums of one block (own) or of one lane of a shard (at its primary), with their data."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self.nodes: frozenset[Node] = frozenset()
        self._weights: dict[Node, Weight] = {}

    def add(self, node: Node, weight: Weight, within: Node | None = None) -> list[Combine] | None:
        """Add a partial. Returns the additions to carry out, in order, or None if it was covered already."""
        # The data is joined where gradients are added, so that a lost member's contribution counts whole or not at all.
        if is_covered(node, self.nodes):
            return None
        self._weights[node] = weight
        self.nodes, steps = absorb(self._fold, self.nodes, node, within)
        for step in steps:
            self._weights[step.parent] = join_weights(self._weights[step.left], self._weights[step.right])
        return steps

    def weight(self, node: Node) -> Weight:
        """Return the data of a partial."""
        return self._weights[node]

    @property
    def complete(self) -> bool:
        """True if the sum over all runs is here."""
        return self._fold.root in self.nodes


@dataclass
class Attempt:
    """Work that the training loop was given, and that has not landed."""

    work: int | TaskAction | None
    """The run or action of the open step, or None for a check of another member."""
    is_void: bool = False
    """True if its results do not count, because the step began anew or is over."""
    is_submitted: bool = False
    """True if the training loop has asked for more work since."""


class Runs(MemberPart):
    """Part that owns the runs handed to this member in the open step. Own partials stay valid in later views."""

    def __init__(self, fold: Fold, blocks: int, first: int) -> None:
        self.fold = fold
        self._blocks = blocks
        self.outstanding: deque[Attempt] = deque()
        """Work of the training loop that has not landed, oldest first. Results come in this order."""
        self.begin(first)

    def begin(self, step: int) -> None:
        """Start anew with a step of which nothing is computed."""
        self.step = step
        # The number of a run does not tell the attempts apart: the loop may get the same run again at once.
        for attempt in self.outstanding:
            attempt.is_void = True
        self.marks: dict[int, StreamMark] = {}
        """Stream -> its mark at the start of the step, if this member has read it."""
        self.pending: list[int] = []
        """Runs still to do here, outstanding ones first."""
        self.targets: list[tuple[Node, ...]] = [()] * self._blocks
        """Per block, nodes of the fold that this member completes before it sends them."""
        self.own = [PartialSet(self.fold) for _ in range(self._blocks)]
        """Per block, the partials that this member has computed."""
        self.sent: set[tuple[int, Node]] = set()
        """(block, target) that were sent to the shards' primaries."""
        self._ended: set[int] = set()

    @property
    def is_void(self) -> bool:
        """True if the next results of the training loop are of work that was handed out before the step began anew."""
        return bool(self.outstanding) and self.outstanding[0].is_void

    @property
    def running(self) -> list[int]:
        """Runs of the open step that the training loop has been given and that have not landed, oldest first."""
        return [each.work for each in self.outstanding if isinstance(each.work, int) and not each.is_void]

    @property
    def actions(self) -> list[TaskAction]:
        """Actions of the open step's pipelines that the training loop has been given and that have not landed."""
        return [each.work for each in self.outstanding if isinstance(each.work, TaskAction) and not each.is_void]

    @handles(p.StreamRead)
    def on_stream_read(self, event: p.StreamRead) -> None:
        """Note the mark of a stream, for this member's vote."""
        if event.step == self.step:
            self.marks[event.mark.stream] = event.mark

    def hand(self, runs: Sequence[int]) -> None:
        """Replace the runs still to do. Targets that lose a run shrink, and new runs make targets of their own.

        A target that was sent for any block is complete and loses nothing, so a sent partial never changes. Runs that
        ended here meanwhile are not done again.
        """
        # The decision rests on reports: a run may have ended here after this member had reported.
        runs = [run for run in runs if run not in self._ended]
        taken = set(self.pending) - set(runs)
        given = set(runs) - set(self.pending)
        kept: list[Node] = []
        # Whole runs have the same targets for all blocks.
        for target in self.targets[0]:
            # The target could never be completed here, so its parts are sent alone.
            if taken & leaves([target]):
                kept.extend(self.fold.cover(leaves([target]) - taken))
            else:
                kept.append(target)
        self.targets = [(*kept, *self.fold.cover(given))] * self._blocks
        self.pending = runs

    def aim(self, runs_by_block: Mapping[int, Collection[int]]) -> None:
        """Add the targets of pipeline tasks. `runs_by_block`: block -> runs whose gradients are computed here."""
        # Targets of tasks are never removed: a task stays with its member as long as the member lives.
        for block, runs in runs_by_block.items():
            targets = self.targets[block]
            self.targets[block] = (*targets, *self.fold.cover(set(runs) - leaves(targets)))

    def start_running(self, work: int | TaskAction | None) -> None:
        """Note that the training loop is given this run or action, or a check."""
        self.outstanding.append(Attempt(work))

    def submit(self) -> None:
        """Note that the training loop asks for more work before the newest has landed."""
        self.outstanding[-1].is_submitted = True

    def end_running(self) -> Attempt:
        """Note that the oldest outstanding work has landed, if there is any, and return it."""
        ended = self.outstanding.popleft() if self.outstanding else Attempt(None)
        if isinstance(ended.work, int) and not ended.is_void:
            self._ended.add(ended.work)
            if ended.work in self.pending:
                self.pending.remove(ended.work)
        return ended

    @property
    def under_way(self) -> int:
        """Number of runs in `pending` that may be under way already and cannot be taken away."""
        # It is one more than the outstanding ones: the loop may have got the next run before the others read this.
        return min(len(self.pending), 1 + len(self.running))

    def is_computing(self) -> bool:
        """Return True if runs are left to compute here, or none were handed out yet."""
        return bool(self.pending or not self.targets[0])

    def add(self, block: int, run: int, weight: Weight) -> list[Combine]:
        """Add a block's gradient of one run. Returns the additions to carry out, or an empty list if it was there."""
        # Additions stop at the target: its siblings may be computed by another member.
        target = next(target for target in self.targets[block] if covers(target, (run, run + 1)))
        return self.own[block].add((run, run + 1), weight, within=target) or []

    def take_unsent(self) -> Iterable[tuple[int, Node]]:
        """Yield each (block, target) that is complete here and not sent yet, and mark it as sent."""
        # The order is by block, as in backward: the last blocks are reduced while the first are still computed.
        for block, partials in enumerate(self.own):
            for target in self.targets[block]:
                if target in partials.nodes and (block, target) not in self.sent:
                    self.sent.add((block, target))
                    yield block, target

    def are_computed(self) -> bool:
        """Return True if all blocks of all runs to do here have their gradients."""
        # The loop asks for more only after the whole run. Its blocks may be complete before.
        runs = [(run, run + 1) for run in self.pending]
        return all(is_covered(run, own.nodes) for own in self.own for run in runs)
