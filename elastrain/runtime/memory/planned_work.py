"""The account of the current plan at run time, for `MemoryKeeper`, and the sizes of a model that accounts need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from elastrain import protocol as p
from elastrain.decisions.agreed_speeds import speeds_of
from elastrain.job.fold import leaves
from elastrain.job.placement import Placement
from elastrain.job.run_plan import Speeds
from elastrain.job.run_plan import plan as hand_out
from elastrain.job.values import Shape
from elastrain.job.world import View
from elastrain.memory import memory_budget as budget
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import MemberAccount, ModelSizes
from elastrain.memory.pipeline_memory import Load, ModelBytes
from elastrain.memory.refused_copies import refusing
from elastrain.offload.activations.spill_policy import IN_FLIGHT_STORAGES
from elastrain.offload.planning.profile import PassProfile
from elastrain.pipeline.planner.plan_room import copies_of
from elastrain.pipeline.stubs.trace import TracedModel
from elastrain.runtime.memory.process_memory import StepsTaken
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import frozen_shards, has_masters
from elastrain.runtime.tensors.executor import Executor

FEW_RUNS = 256
"""Up to so many runs of a step, the gradient slots of the largest share are counted exactly."""


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


def model_sizes(model: ModelState) -> ModelSizes:
    """Return the sizes that a member's account depends on."""
    layout = model.layout
    return ModelSizes(
        frozen=frozen_shards(layout),
        masters=has_masters(layout),
        slot_bytes=model.gradients.copy_bytes,
        whole_bytes=bytes_of(model, range(len(layout.blocks))),
    )


def measured_needs(
    account: MemberAccount, executor: Executor, taken: StepsTaken, last: PassProfile | None
) -> budget.Needs:
    """Return the needs of a plan, with what was measured in place of what was expected.

    last: profile of the last forward and backward, if any was measured.
    """
    base_bytes = taken.base_bytes(executor.memory_bytes())
    needs = account.needs(base_bytes=base_bytes, parameters_bytes=executor.model.nbytes)
    # In pipelines the tasks may differ from those of the last pass, and several micro-batches are in flight.
    saved_bytes, largest_bytes = needs.activations_bytes, 0
    if last is not None:
        saved_bytes = saved_bytes or last.saved_bytes
        largest_bytes = max((each.size_bytes for each in last.lifetimes), default=0)
    return replace(
        needs,
        activations_bytes=saved_bytes,
        activations_least_bytes=min(saved_bytes, (IN_FLIGHT_STORAGES + 1) * largest_bytes),
        is_measured=taken.steps > 0,
    )


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
    """The account of the current plan, as the engine tells it: the view, placements, runs and tasks."""

    def __init__(self, me: str, executor: Executor, trim: Callable[[], None]) -> None:
        """Start without a plan. `trim`: returns unused shared memory to the kernel."""
        self.account: MemberAccount | None = None
        """None before the first view."""
        self.has_room_for_all = True
        """True if there is room for all blocks, which a member of a pipeline gets at the end of the loop."""
        self.refused: frozenset[int] = frozenset()
        """Shards of which this member takes no copy under the current plan, for lack of memory."""
        self.lack: budget.Shortfall | None = None
        """The lack of memory that ends this member. None while its plan has room."""
        self.leftovers = Leftovers(trim)
        self.me, self._executor = me, executor
        self._model: ModelBytes | None = None

    def resume(self, plan: p.Resumed, shape: Shape, load: Load | None) -> MemberAccount:
        """Take over the plan of a new view."""
        before = self.account
        memory = MemoryKind.ONE if self._executor.memory.port.is_host else MemoryKind.DEVICE
        account = MemberAccount(
            me=self.me,
            shape=shape,
            sizes=replace(model_sizes(self._executor.model), memory=memory),
            view=plan.view,
            placements=(plan.recovery.now, plan.target),
            slots=0 if shape.pipelining is not None else self._slots(plan, shape),
            is_checked=plan.is_checking,
            is_fresh=self._executor.states.moments() is None,
            pipeline=None if before is None else before.pipeline,
            is_over=before is not None and before.is_over,
        )
        self.account, self.refused = account, frozenset()
        return self.take(load, account.placements)

    def _slots(self, plan: p.Resumed, shape: Shape) -> int:
        """Return the gradient slots needed at the peak: the larger of an undisturbed and of the resumed step."""
        done = leaves(plan.own)
        left = [run for run in plan.recovery.runs[self.me] if run not in done]
        undisturbed = self._undisturbed(plan.view, shape, speeds_of(plan.recovery.record))
        return max(undisturbed, budget.slots_needed(shape.runs, plan.own, left))

    def _undisturbed(self, view: View, shape: Shape, speeds: Speeds) -> int:
        return budget.slots_needed(shape.runs, (), hand_out(view.ids, shape.runs, speeds)[self.me])

    def share(self, speeds: Speeds) -> MemberAccount:
        """Take over the shares of the runs that a record has agreed upon. They change the gradient slots."""
        before = self.account
        assert before is not None
        if before.shape.pipelining is None:
            slots = self._undisturbed(before.view, before.shape, speeds)
            self.account = replace(before, slots=slots)
        return self.account or before

    @property
    def growth_bytes(self) -> int:
        """Bytes of the gradient slots that the largest share of the runs would need more than this one."""
        account = self.account
        if account is None or account.shape.pipelining is not None:
            return 0
        most = copies_of(account.shape.runs) if account.shape.runs <= FEW_RUNS else 2 * account.shape.runs.bit_length()
        return max(0, most - account.slots) * account.sizes.slot_bytes

    def trace(self, traced: TracedModel, places: Sequence[int]) -> None:
        """Keep the sizes of the traced model. The main thread calls it before the engine hears of the trace."""
        self._model = model_bytes(self._executor.model, traced, places)

    def take(self, load: Load | None, placements: tuple[Placement, Placement]) -> MemberAccount:
        """Take over the tasks that are left to compute, and the holders of shards: present, and to come."""
        before = self.account
        assert before is not None
        moments = self._executor.states.moments() or budget.ASSUMED_MOMENTS
        account = replace(before, placements=refusing(placements, self.me, self.refused), moments=moments)
        if load is not None and self._model is not None and not before.is_over:
            account = replace(account, pipeline=(self._model, load))
        if account == before:
            return before
        if account.tasks != before.tasks:
            self.leftovers.begin()
        self.account = account
        return account

    def forget_tasks(self, *, for_good: bool) -> None:
        """Forget all tasks. `for_good`: the loop has ended, and no tasks will follow."""
        if self.account is not None:
            self.account = replace(self.account, pipeline=None, is_over=for_good)
