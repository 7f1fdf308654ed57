"""The bytes of what the current plan makes this member compute and hold, for `MemoryKeeper`."""

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
"""Size of the optimizer state in units of the parameters, until it was measured: that of Adam."""


def bytes_of(model: ModelState, blocks: Collection[int]) -> int:
    """Return the bytes of the parameters that these blocks of the layout read, present or not."""
    read = [index for index, readers in model.readers.items() if any(block in blocks for block in readers)]
    flats = [flat for flat in model.layout.flats if flat.index in read]
    return sum(flat.numel * getattr(torch, flat.dtype).itemsize for flat in flats)


def model_bytes(model: ModelState, traced: TracedModel, places: Sequence[int]) -> ModelBytes:
    """Return the sizes of a traced model. `places`: the place in the graph of each block of the layout."""
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
    """The buffers that were sent for earlier tasks. Their sizes differ, so they would stay beside those of new tasks.

    Peers release them one by one, some only after they have begun the next step.
    """

    def __init__(self, trim: Callable[[], None]) -> None:
        self._trim = trim
        self._are_expected = False

    def begin(self) -> None:
        """Start to trim memory, because the tasks changed."""
        self._are_expected = True
        self._trim()

    def give_back(self) -> None:
        """Return unused memory to the kernel. Called between micro-batches."""
        if self._are_expected:
            self._trim()

    def end(self) -> None:
        """Trim for the last time, after a commit: no peer holds buffers of the step before it."""
        self.give_back()
        self._are_expected = False


class PlannedWork:
    """The expected needs of a plan: shards, copies of gradients and, in pipelines, the memory of its tasks."""

    def __init__(self, me: str, executor: Executor, trim: Callable[[], None]) -> None:
        """Start without a plan. `trim`: returns unused shared memory to the kernel."""
        self.held: tuple[budget.Held, ...] = ()
        """Shards that this member holds in the current placement or in the target."""
        self.tasks = TaskBytes()
        """Needs of the open step's tasks. Zero without pipelines, and before tasks are assigned."""
        self.copied_bytes = 0
        """Bytes of parameters that may be on their way to new holders at once."""
        self.leftovers = Leftovers(trim)
        self._me, self._executor = me, executor
        self._model: ModelBytes | None = None
        self._load: Load | None = None
        self._is_over = False
        """True once this member's loop has ended."""
        self._placements: tuple[Placement, ...] = ()
        self.view: View | None = None
        self.has_room_for_all = True
        """True if there is room for all blocks, which a member of a pipeline gets at the end of the loop."""

    @property
    def members(self) -> int:
        """Number of members in the view; 1 without a view."""
        return 1 if self.view is None else len(self.view.members)

    @property
    def is_first(self) -> bool:
        """True if this member has rank 0."""
        return self.view is None or self.view.ids[0] == self._me

    @property
    def moments(self) -> float:
        """Size of the optimizer's own state, in units of the parameters'."""
        return self._executor.states.moments() or ASSUMED_MOMENTS

    @property
    def sums_bytes(self) -> int:
        """Bytes that gradients take besides slots."""
        if self._is_over:
            return 0
        return budget.sums_bytes(self.held, self.members, BEHIND_BYTES)

    @property
    def copying_bytes(self) -> int:
        """Bytes of the copies that are on their way to new holders."""
        is_moving = len(set(self._placements)) > 1
        return round(2 * self.copied_bytes * (1 + self.moments)) if is_moving else 0

    def place(self, shape: Shape, placements: tuple[Placement, ...]) -> bool:
        """Take over placement and target. Returns True if this member holds other shards than before."""
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
        """Return the gradient slots needed at the peak: the larger of an undisturbed and of the resumed step."""
        is_checked = plan.is_checking or shape.cross_check_every > 0 or shape.audit.every > 0
        undisturbed = hand_out(plan.view.ids, shape.runs, plan.view.quotas)[self._me]
        return max(
            budget.slots_needed(shape.runs, (), undisturbed, is_checked=is_checked),
            budget.slots_needed(shape.runs, plan.own, _left_to_do(plan.recovery.runs[self._me], plan.own)),
        )

    def trace(self, traced: TracedModel, places: Sequence[int]) -> None:
        """Keep the sizes of the traced model. The main thread calls it before the engine hears of the trace."""
        self._model = model_bytes(self._executor.model, traced, places)

    def take(self, load: Load | None) -> bool:
        """Take over the tasks that are left to compute. Returns True if their needs changed."""
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
        """Forget all tasks. `for_good`: the loop has ended, and no tasks will follow."""
        self._load, self.tasks, self._is_over = None, TaskBytes(), for_good

    def whole_bytes(self) -> int:
        """Return the bytes of all blocks' parameters, which rank 0 gets at the end of the loop; 0 without pipelines."""
        if self._model is None:
            return 0
        return bytes_of(self._executor.model, range(len(self._model.places)))

    def explain(self, needs: budget.Needs, missing_bytes: int, *, activations_leave: bool) -> str:
        """Return advice on what would fit if the tasks of a pipeline do not, or "" if there are no tasks."""
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
