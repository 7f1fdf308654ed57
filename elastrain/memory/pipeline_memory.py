"""What a member of a pipeline takes of memory for its tasks, and what would fit where a memory limit is too small.

Functions of sizes and of tasks: nothing is measured here. Every member decides for itself, by its own limit.

States what members of pipelines take for their blocks and tasks, before a job starts: by the first plan.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elastrain.memory.memory_budget import Needs, mib, slots_needed
from elastrain.pipeline.graph import BlockGraph, CrossingTensor
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, held, routes
from elastrain.pipeline.planning import PlanWish, first_plan


@dataclass(frozen=True, kw_only=True)
class ModelBytes:
    """What the blocks of a traced model take, in bytes."""

    graph: BlockGraph
    places: tuple[int, ...]
    """By block of the layout, its place in the graph."""
    parameters: tuple[int, ...]
    """By block of the layout; a weight that several read counts in each."""
    gradients: tuple[int, ...]
    """By block of the layout: one copy."""
    saved: tuple[int, ...]
    """By place: what the forward of one micro-batch keeps for its backward."""

    def parameters_of(self, block: int) -> int:
        """Of one block of the graph."""
        return sum(size for size, place in zip(self.parameters, self.places, strict=True) if place == block)

    def gradients_of(self, block: int) -> int:
        """One copy of the gradients of one block of the graph."""
        return sum(size for size, place in zip(self.gradients, self.places, strict=True) if place == block)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a member computes of one step in pipelines."""

    tasks: tuple[Task, ...]
    """Those that are done, too: what their run left is kept until the commit."""
    shape: StepShape
    in_flight: int
    """How many micro-batches may be in flight (see `actions.choose`)."""
    copies_received: bool = False
    """What is received lies in this member's memory, as between nodes; on one host its maker's is read."""


@dataclass(frozen=True, kw_only=True)
class TaskBytes:
    """What tasks take at the peak of a step."""

    gradients_bytes: int = 0
    boundaries_bytes: int = 0
    """All of a step, which stay until it is committed, and what graphs in flight hold of them."""
    activations_bytes: int = 0
    """Saved for backward by all micro-batches that are in flight at once."""

    @property
    def total_bytes(self) -> int:
        return self.gradients_bytes + self.boundaries_bytes + self.activations_bytes


def task_bytes(model: ModelBytes, load: Load) -> TaskBytes:
    """Count what the tasks of one member take."""
    in_flight = _in_flight(load)
    kept_bytes = sum(
        (_made_bytes(model.graph, task) + load.copies_received * _received_bytes(model.graph, task))
        * len(load.shape.micro_batches_of(task.run))
        for task in load.tasks
    )
    # What was received is saved by the first block; what is handed on by none, and stays until its backward.
    held_bytes = sum(count * _bytes_of(model.graph.crossings[end]) for (_, end), count in in_flight.items())
    return TaskBytes(
        gradients_bytes=_gradients_bytes(model, load),
        boundaries_bytes=kept_bytes + held_bytes,
        activations_bytes=sum(count * sum(model.saved[begin:end]) for (begin, end), count in in_flight.items()),
    )


def _in_flight(load: Load) -> Mapping[tuple[int, int], int]:
    """Stretch -> the most micro-batches of it that are in flight at once."""
    # A forward is held back by tasks that begin at its cut or deeper, so that stretches have their limits side by side.
    counts: dict[tuple[int, int], int] = {}
    for task in load.tasks:
        stretch = (task.begin, task.end)
        counts[stretch] = counts.get(stretch, 0) + len(load.shape.micro_batches_of(task.run))
    return {stretch: min(count, load.in_flight) for stretch, count in counts.items()}


def _gradients_bytes(model: ModelBytes, load: Load) -> int:
    # By block: of runs that are no neighbours in the fold, each keeps a copy until what lies between them is there.
    total_bytes = 0
    for block, place in enumerate(model.places):
        runs = sorted({task.run for task in load.tasks if place in task.blocks})
        total_bytes += slots_needed(load.shape.runs, (), runs) * model.gradients[block]
    return total_bytes


def _made_bytes(graph: BlockGraph, task: Task) -> int:
    """Activations behind the task and gradients before it, of one micro-batch."""
    return _bytes_of(graph.crossings[task.end]) + _gradient_bytes(graph.crossings[task.begin])


def _received_bytes(graph: BlockGraph, task: Task) -> int:
    return _bytes_of(graph.crossings[task.begin]) + _gradient_bytes(graph.crossings[task.end])


def _bytes_of(crossing: Iterable[CrossingTensor]) -> int:
    return sum(each.size_bytes for each in crossing)


def _gradient_bytes(crossing: Iterable[CrossingTensor]) -> int:
    return sum(each.size_bytes for each in crossing if each.requires_grad)  # masks and positions go one way only


@dataclass(frozen=True, kw_only=True)
class Lack:
    """A limit that is too small for the tasks of one of `members` members."""

    members: int
    left_bytes: int
    """What the limit leaves for parameters and tasks."""
    missing_bytes: int
    activations_leave: bool
    """They go to disk: what tasks take is counted without them."""
    parameters_bytes: int | None = None
    """What every member holds of parameters, whatever its blocks: before the first commit. None: those of its own."""


def lack_of(
    needs: Needs, tasks: TaskBytes, *, members: int, missing_bytes: int, whole_bytes: int, activations_leave: bool
) -> Lack:
    """Of a member with these needs, among them those of its tasks; `whole_bytes`: parameters of all blocks."""
    leaving_bytes = tasks.activations_bytes if activations_leave else 0
    return Lack(
        members=members,
        left_bytes=needs.parameters_bytes + tasks.total_bytes - leaving_bytes - missing_bytes,
        missing_bytes=missing_bytes,
        activations_leave=activations_leave,
        # Until the first commit each member has the whole model, as its script has made it.
        parameters_bytes=whole_bytes if needs.parameters_bytes >= whole_bytes else None,
    )


def advice(model: ModelBytes, load: Load, lack: Lack) -> str:
    """Say which of the member's blocks is the costliest, where the model can be cut, and what would fit."""
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
    """Count parameters and tasks of the costliest member, if all of them begin with so many stages.

    load: of any member, for what is the same of all.
    """
    names = [str(number) for number in range(lack.members)]
    plan = first_plan(model.graph, names, PlanWish(stages=stages, runs=load.shape.runs))
    return max(_member_bytes(model, load, plan, name, lack) for name in names)


def _member_bytes(model: ModelBytes, load: Load, plan: PipelinePlan, member: str, lack: Lack) -> int:
    tasks = tuple(task for route in routes(plan) for task in route if task.member == member)
    taken = task_bytes(model, replace(load, tasks=tasks, in_flight=plan.limits[member]))
    own_bytes = sum(model.parameters_of(block) for block in held(plan)[member])
    parameters_bytes = own_bytes if lack.parameters_bytes is None else lack.parameters_bytes
    leaving_bytes = taken.activations_bytes if lack.activations_leave else 0
    return parameters_bytes + taken.total_bytes - leaving_bytes


def _block_bytes(model: ModelBytes, load: Load, lack: Lack, block: int) -> int:
    """What a block takes: parameters, one copy of the gradients, and what is saved of micro-batches in flight."""
    counts = [count for (begin, end), count in _in_flight(load).items() if begin <= block < end]
    saved_bytes = 0 if lack.activations_leave else sum(counts) * model.saved[block]
    return model.parameters_of(block) + model.gradients_of(block) + saved_bytes


@dataclass(frozen=True, kw_only=True)
class StagedScript:
    """What a script computes in pipelines; the same on every member."""

    model: ModelBytes
    stages: int
    shape: StepShape
    lanes: tuple[tuple[int, ...], ...]
    """Per shard, the blocks of the layout that have a part of it."""
    copied_bytes: int
    """So many bytes of parameters may be on their way to new holders, where memory does not forbid it."""

    def plan(self, members: Sequence[str]) -> PipelinePlan:
        """The plan that a job of these members begins with. Raises ConfigError where the model has too few cuts."""
        wish = PlanWish(stages=self.stages, runs=self.shape.runs)
        return first_plan(self.model.graph, members, wish)

    def homes(self, plan: PipelinePlan) -> list[tuple[str, ...]]:
        """Per shard, the members that compute with it."""
        places = [{self.model.places[block] for block in blocks} for blocks in self.lanes]
        return [tuple(member for member, its in held(plan).items() if not its.isdisjoint(at)) for at in places]

    def parameters_bytes(self, plan: PipelinePlan, member: str, shards: Iterable[int]) -> int:
        """Of the member's blocks and of those in which these shards lie; a weight that several read counts in each."""
        # States of its own shards work on the model's memory.
        besides = {self.model.places[block] for shard in shards for block in self.lanes[shard]}
        return sum(self.model.parameters_of(place) for place in held(plan)[member] | besides)

    def load(self, plan: PipelinePlan, member: str, *, is_spread: bool) -> Load:
        """What the member computes of a step. `is_spread`: members are on several nodes."""
        tasks = tuple(task for route in routes(plan) for task in route if task.member == member)
        return Load(tasks=tasks, shape=self.shape, in_flight=plan.limits[member], copies_received=is_spread)
