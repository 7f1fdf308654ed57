"""States what members of pipelines take for their blocks and tasks, before a job starts: by the first plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elastrain.pipeline.plan import PipelinePlan, held, routes
from elastrain.pipeline.planning import PlanWish, first_plan
from elastrain.pipeline.room import Load, ModelBytes
from elastrain.pipeline.tasks import StepShape


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
