"""Memory that a pipeline's member needs for its blocks and tasks, and advice if a memory limit is too small. Pure.

Functions of sizes and tasks; nothing is measured here. Every member decides for itself, by its own limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from elastrain.memory.memory_budget import mib, slots_needed
from elastrain.pipeline.graph import BlockGraph, CrossingTensor
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, held, routes
from elastrain.pipeline.planning import PlanWish, first_plan


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """Bytes of the blocks of a traced model."""

    graph: BlockGraph
    places: tuple[int, ...]
    """Per block of the layout, its place in the graph."""
    parameters: tuple[int, ...]
    """Per block of the layout. A weight shared by several blocks counts in each."""
    gradients: tuple[int, ...]
    """Per block of the layout: one copy."""
    saved: tuple[int, ...]
    """Per block of the graph: bytes that the forward of one micro-batch keeps for its backward."""

    def parameters_of(self, block: int) -> int:
        """Return the bytes of the parameters of one block of the graph."""
        return sum(size for size, place in zip(self.parameters, self.places, strict=True) if place == block)

    def gradients_of(self, block: int) -> int:
        """Return the bytes of one copy of the gradients of one block of the graph."""
        return sum(size for size, place in zip(self.gradients, self.places, strict=True) if place == block)


@dataclass(frozen=True, kw_only=True)
class Load:
    """The work of a member in one step in pipelines."""

    tasks: tuple[Task, ...]
    """All tasks, also those that are done: boundary tensors of their run are kept until the commit."""
    shape: StepShape
    in_flight: int
    """Limit of micro-batches in flight (see `actions.choose`)."""
    copies_received: bool = False
    """True if received tensors are copied to this member's memory, as between nodes.

    On one host it reads the maker's.
    """


@dataclass(frozen=True, kw_only=True)
class TaskBytes:
    """Bytes that tasks need at the peak of a step."""

    gradients_bytes: int = 0
    boundaries_bytes: int = 0
    """All boundary tensors of a step, which stay until the commit, and those that graphs in flight hold."""
    activations_bytes: int = 0
    """Activations saved for backward by all micro-batches that are in flight at once."""

    @property
    def total_bytes(self) -> int:
        """All bytes of the tasks."""
        return self.gradients_bytes + self.boundaries_bytes + self.activations_bytes


def tasks_of(plan: PipelinePlan, member: str) -> tuple[Task, ...]:
    """Return the tasks that the plan gives to one member."""
    return tuple(task for route in routes(plan) for task in route if task.member == member)


def task_bytes(model: ModelBytes, load: Load) -> TaskBytes:
    """Count the bytes that the tasks of one member need."""
    blocks, ends = _in_flight(load)
    kept_bytes = sum(
        (_made_bytes(model.graph, task) + load.copies_received * _received_bytes(model.graph, task))
        * len(load.shape.micro_batches_of(task.run))
        for task in load.tasks
    )
    # The first block saves what was received. No block saves what is handed on; it stays until its backward.
    held_bytes = sum(count * _bytes_of(model.graph.crossings[end]) for end, count in ends.items())
    return TaskBytes(
        gradients_bytes=_gradients_bytes(model, load),
        boundaries_bytes=kept_bytes + held_bytes,
        activations_bytes=sum(count * model.saved[block] for block, count in blocks.items()),
    )


def _in_flight(load: Load) -> tuple[Mapping[int, int], Mapping[int, int]]:
    """Return, per block and per end of a task, the most micro-batches that are in flight at once."""
    # A forward is held back by tasks that end behind its cut. Of the tasks in flight with one block, the last that
    # began was held back by all others. So the limit holds for each block, whatever the stretches are.
    blocks, ends = Counter[int](), Counter[int]()
    for task in load.tasks:
        count = len(load.shape.micro_batches_of(task.run))
        blocks.update(dict.fromkeys(task.blocks, count))
        ends[task.end] += count
    return _limited(blocks, load.in_flight), _limited(ends, load.in_flight)


def _limited(counts: Mapping[int, int], limit: int) -> Mapping[int, int]:
    return {key: min(count, limit) for key, count in counts.items()}


def _gradients_bytes(model: ModelBytes, load: Load) -> int:
    # By block: runs that are not neighbours in the fold keep a copy each, until what lies between them is computed.
    total_bytes = 0
    for block, place in enumerate(model.places):
        runs = sorted({task.run for task in load.tasks if place in task.blocks})
        total_bytes += slots_needed(load.shape.runs, (), runs) * model.gradients[block]
    return total_bytes


def _made_bytes(graph: BlockGraph, task: Task) -> int:
    """Count the bytes of the activations behind the task and the gradients before it, of one micro-batch."""
    return _bytes_of(graph.crossings[task.end]) + _gradient_bytes(graph.crossings[task.begin])


def _received_bytes(graph: BlockGraph, task: Task) -> int:
    return _bytes_of(graph.crossings[task.begin]) + _gradient_bytes(graph.crossings[task.end])


def _bytes_of(crossing: Iterable[CrossingTensor]) -> int:
    return sum(each.size_bytes for each in crossing)


def _gradient_bytes(crossing: Iterable[CrossingTensor]) -> int:
    return sum(each.size_bytes for each in crossing if each.requires_grad)  # masks and positions go one way only


@dataclass(frozen=True, kw_only=True)
class Lack:
    """Lack of memory: a limit that is too small for the tasks of one of `members` members."""

    members: int
    left_bytes: int
    """Bytes that the limit leaves for parameters and tasks."""
    missing_bytes: int
    activations_leave: bool
    """True if activations move to disk. Tasks are then counted without them."""
    parameters_bytes: int | None = None
    """Parameters that every member holds before the first commit, whatever its blocks.

    None: those of its own blocks.
    """


def advice(model: ModelBytes, load: Load, lack: Lack) -> str:
    """Return a text with the member's largest block, the legal cuts of the model, and what would fit."""
    graph = model.graph
    blocks = {block for task in load.tasks for block in task.blocks}
    sizes = {block: _block_bytes(model, load, lack, block) for block in blocks}
    costliest = min(sizes, key=lambda block: (-sizes[block], block))  # of equals the first, in every run alike
    cuts = ", ".join(f"before {graph.blocks[cut]!r}" for cut in graph.legal_cuts) or "none"
    return (
        f"of its blocks {graph.blocks[costliest]!r} takes most, {mib(sizes[costliest])}; legal cuts: {cuts}; "
        f"{_what_fits(model, load, lack)}"
    )


def _what_fits(model: ModelBytes, load: Load, lack: Lack) -> str:
    most = min(lack.members, len(model.graph.units))  # a stage has a member, and no cut divides a unit
    needed = {stages: heaviest_bytes(model, load, stages, lack) for stages in range(1, most + 1)}
    fitting = [stages for stages, size_bytes in needed.items() if size_bytes <= lack.left_bytes]
    if fitting:
        return f"--stages {fitting[0]} would fit"
    best = min(needed, key=lambda stages: (needed[stages], stages))
    raised_bytes = min(lack.missing_bytes, needed[best] - lack.left_bytes)
    return f"what fits best is --stages {best}, with a limit that is {mib(raised_bytes)} larger"


def heaviest_bytes(model: ModelBytes, load: Load, stages: int, lack: Lack) -> int:
    """Count parameters and tasks of the member that needs most, if all members begin with `stages` stages.

    load: of any member, for the values that all share.
    """
    names = [str(number) for number in range(lack.members)]
    plan = first_plan(model.graph, names, PlanWish(stages=stages, runs=load.shape.runs))
    return max(_member_bytes(model, load, plan, name, lack) for name in names)


def _member_bytes(model: ModelBytes, load: Load, plan: PipelinePlan, member: str, lack: Lack) -> int:
    taken = task_bytes(model, replace(load, tasks=tasks_of(plan, member), in_flight=plan.limits[member]))
    own_bytes = sum(model.parameters_of(block) for block in held(plan)[member])
    parameters_bytes = own_bytes if lack.parameters_bytes is None else lack.parameters_bytes
    leaving_bytes = taken.activations_bytes if lack.activations_leave else 0
    return parameters_bytes + taken.total_bytes - leaving_bytes


def _block_bytes(model: ModelBytes, load: Load, lack: Lack, block: int) -> int:
    """Count the bytes of a block: parameters, one copy of the gradients, and activations of micro-batches in flight."""
    saved_bytes = 0 if lack.activations_leave else _in_flight(load)[0][block] * model.saved[block]
    return model.parameters_of(block) + model.gradients_of(block) + saved_bytes
