"""What the present plan has this member compute and hold, in bytes, as the keeper of its memory asks for it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from elastrain import protocol as p
from elastrain.buffers.background import BEHIND_BYTES
from elastrain.job.fold import Node, leaves
from elastrain.job.placement import Placement
from elastrain.job.run_plan import plan as hand_out
from elastrain.job.values import Shape
from elastrain.job.world import View
from elastrain.memory import memory_budget as budget
from elastrain.memory.pipeline_memory import Load, ModelBytes, TaskBytes, advice, lack_of, task_bytes
from elastrain.pipeline.stubs.trace import TracedModel
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import frozen_shards, has_masters
from elastrain.runtime.tensors.executor import Executor

ASSUMED_MOMENTS = 2.0
"""Optimizer state per parameter until it was measured: Adam's."""


def bytes_of(model: ModelState, blocks: Collection[int]) -> int:
    """Bytes of the parameters that these blocks of the layout read, here or not."""
    read = [index for index, readers in model.readers.items() if any(block in blocks for block in readers)]
    flats = [flat for flat in model.layout.flats if flat.index in read]
    return sum(flat.numel * getattr(torch, flat.dtype).itemsize for flat in flats)


def model_bytes(model: ModelState, traced: TracedModel, places: Sequence[int]) -> ModelBytes:
    """Sizes of a traced model; `places`: per block of the layout, its place in the graph."""
    blocks = range(len(places))
    return ModelBytes(
        graph=traced.graph,
        places=tuple(places),
        parameters=tuple(bytes_of(model, (block,)) for block in blocks),
        gradients=tuple(model.gradients.bytes_of(block) for block in blocks),
        saved=traced.saved,
    )


def _left_to_do(runs: Sequence[int], own: frozenset[Node]) -> list[int]:
    done = leaves(own)
    return [run for run in runs if run not in done]


class Leftovers:
    """Memory of what was sent for other tasks: it is of other sizes, and would stay beside what is sent for these.

    Peers let go of it one by one, some only when they have begun the next step.
    """

    def __init__(self, trim: Callable[[], None]) -> None:
        self._trim = trim
        self._are_expected = False

    def begin(self) -> None:
        """The tasks are other ones now."""
        self._are_expected = True
        self._trim()

    def give_back(self) -> None:
        """Between micro-batches: return to the kernel what holds nothing now."""
        if self._are_expected:
            self._trim()

    def end(self) -> None:
        """A step was committed: nobody has anything of the one before it."""
        self.give_back()
        self._are_expected = False


class PlannedWork:
    """Owns what is expected of a plan: shards, copies of gradients and, in pipelines, what its tasks take."""

    def __init__(self, me: str, executor: Executor, trim: Callable[[], None]) -> None:
        """`trim`: gives memory that others read, and that holds nothing now, back to the kernel."""
        self.held: tuple[budget.Held, ...] = ()
        """Shards of this member, by the holders of now and by those to come."""
        self.tasks = TaskBytes()
        """Of the open step; nothing without pipelines, and before tasks were handed out."""
        self.copied_bytes = 0
        """So many bytes of parameters may be on their way to new holders."""
        self.leftovers = Leftovers(trim)
        self._me, self._executor = me, executor
        self._model: ModelBytes | None = None
        self._load: Load | None = None
        self._is_over = False
        """This member's loop has ended."""
        self._placements: tuple[Placement, ...] = ()
        self.view: View | None = None
        self.has_room_for_all = True
        """For all blocks, which a member of a pipeline takes at the end of the loop."""

    @property
    def members(self) -> int:
        """How many there are in the view."""
        return 1 if self.view is None else len(self.view.members)

    @property
    def is_first(self) -> bool:
        """This member has rank 0."""
        return self.view is None or self.view.ids[0] == self._me

    @property
    def moments(self) -> float:
        """Size of the optimizer's own state, in units of the parameters'."""
        return self._executor.states.moments() or ASSUMED_MOMENTS

    @property
    def sums_bytes(self) -> int:
        """What gradients take besides slots."""
        if self._is_over:
            return 0
        return budget.sums_bytes(self.held, self.members, BEHIND_BYTES)

    @property
    def copying_bytes(self) -> int:
        """What copies take that are on their way."""
        is_moving = len(set(self._placements)) > 1
        return round(2 * self.copied_bytes * (1 + self.moments)) if is_moving else 0

    def place(self, shape: Shape, placements: tuple[Placement, ...]) -> bool:
        """Take up who holds the shards now, and who is to; whether this member is to hold others than before."""
        before, self._placements = self.held, placements
        self.held = budget.held_by(
            self._me,
            placements,
            shape.sizes,
            moments=self.moments,
            masters=has_masters(self._executor.layout),
            frozen=frozen_shards(self._executor.layout),
        )
        return self.held != before

    def slots(self, plan: p.Resumed, shape: Shape) -> int:
        """Copies of the gradient at the peak of a step: of one that nothing disturbs, and of the one to be resumed."""
        is_checked = plan.is_checking or shape.cross_check_every > 0 or shape.audit.every > 0
        undisturbed = hand_out(plan.view.ids, shape.runs, plan.view.quotas)[self._me]
        return max(
            budget.slots_needed(shape.runs, (), undisturbed, is_checked=is_checked),
            budget.slots_needed(shape.runs, plan.own, _left_to_do(plan.recovery.runs[self._me], plan.own)),
        )

    def trace(self, traced: TracedModel, places: Sequence[int]) -> None:
        """The model was traced. By the main thread, before anybody is told of it."""
        self._model = model_bytes(self._executor.model, traced, places)

    def take(self, load: Load | None) -> bool:
        """Take up the tasks that are left to compute; whether they are other ones."""
        if load is None or self._model is None or self._is_over:
            return False
        load = replace(load, copies_received=self.view is not None and len(set(self.view.nodes.values())) > 1)
        if load == self._load:
            return False
        self._load, before = load, self.tasks
        self.tasks = task_bytes(self._model, load)
        if self.tasks != before:
            self.leftovers.begin()
        return self.tasks != before

    def forget_tasks(self, *, for_good: bool) -> None:
        """None of them is under way, and, `for_good`, none will be."""
        self._load, self.tasks, self._is_over = None, TaskBytes(), for_good

    def whole_bytes(self) -> int:
        """Of the parameters of all blocks, which rank 0 takes at the end of the loop; 0 without pipelines."""
        if self._model is None:
            return 0
        return bytes_of(self._executor.model, range(len(self._model.places)))

    def explain(self, needs: budget.Needs, missing_bytes: int, *, activations_leave: bool) -> str:
        """What else would fit, where the tasks of a pipeline do not; empty where there are none."""
        if self._is_over:
            return budget.AT_THE_END
        if self._model is None or self._load is None or not self._load.tasks:
            return ""
        lack = lack_of(
            needs,
            self.tasks,
            members=self.members,
            missing_bytes=missing_bytes,
            whole_bytes=self.whole_bytes(),
            activations_leave=activations_leave,
        )
        return f"; {advice(self._model, self._load, lack)}"
