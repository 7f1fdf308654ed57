"""The memory check of a pipeline before it is planned: what each member needs, and the in-flight limits that fit. Pure.

It bounds what `memory/pipeline_memory.py` counts exactly, without going through all runs of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from elastrain.memory.memory_budget import mib
from elastrain.pipeline.pipeline_plan import Bound, Cuts, Pipeline, PipelinePlan
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.pipeline.planner.step_profile import JobProfile

ROOM_BITS = 5
"""Leading bits of a member's room that count."""
Stretch = tuple[int | Bound, int | Bound]
"""The cuts between which a member computes."""


@dataclass(frozen=True, kw_only=True)
class PlanMemory:
    """Memory limits of members, and bytes that blocks need besides their parameters."""

    limits_bytes: Mapping[str, int] = field(default_factory=dict)
    """Member -> limit. A member that is not named has none."""
    base_bytes: Mapping[str, int] = field(default_factory=dict)
    """Member -> part of its memory that belongs to no block. A member that is not named has none."""
    gradient_bytes: tuple[int, ...] = ()
    """Per block: one copy. Empty: gradients are not counted."""
    saved_bytes: tuple[int, ...] = ()
    """Per block: activations that one micro-batch keeps for its backward. Empty: they are not counted."""
    state_per_parameter: float = 0.0
    """Bytes of shards and backups on a member, for each byte of its parameters."""
    activations_leave: bool = False
    """True if saved activations may move to disk. They leave before a limit falls or a bound shifts."""
    may_split: bool = True
    """True if backwards may be split. Where saved activations may move to disk, all stay whole."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A member for which a plan has no room, even with one micro-batch in flight."""

    member: str
    missing_bytes: int
    part: str
    """The part that takes most of its memory."""
    plan: str = ""
    """The pipeline, for people."""


@dataclass(frozen=True, kw_only=True)
class PlanRoom:
    """Room for the pipelines of one job."""

    profile: JobProfile
    memory: PlanMemory
    run_length: int = 1

    @cached_property
    def _sums(self) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
        none = (0,) * len(self.profile.blocks)
        each = (self.profile.parameter_bytes, self.memory.gradient_bytes or none, self.memory.saved_bytes or none)
        first, second, third = (tuple(accumulate(sizes, initial=0)) for sizes in each)
        return first, second, third

    def limits(self, pipeline: Pipeline) -> tuple[int, ...] | Shortage:
        """Return the in-flight limits with which each member has room: those of the pipeline, or lower ones."""
        if not self.memory.limits_bytes:
            return pipeline.limits
        found = []
        blocks = len(self.profile.blocks)
        cuts = (0, *pipeline.cuts, blocks)
        for place, (member, limit) in enumerate(zip(pipeline.members, pipeline.limits, strict=True)):
            # Limits fall member by member: one with little memory does not slow down the others.
            stretch = (cuts[place], cuts[place + 1])
            most = self.most_in_flight(member, stretch, pipeline.share, is_split=pipeline.is_split and place > 0)
            if isinstance(most, Shortage):
                return most
            found.append(min(limit, most))
        return tuple(found)

    def taken_bytes(self, plan: PipelinePlan) -> Mapping[str, int]:
        """Return what the blocks and tasks of each member of a plan take, by the same count as everywhere here."""
        found: dict[str, int] = {}
        for pipeline in plan.pipelines:
            cuts = (0, *pipeline.cuts, plan.blocks)
            for place, (member, limit) in enumerate(zip(pipeline.members, pipeline.limits, strict=True)):
                stretch = (cuts[place], cuts[place + 1])
                parts = self._parts(member, stretch, pipeline.share)
                in_flight = min(limit, pipeline.share * self.run_length)
                parts["activations"] = in_flight * self._each_bytes(stretch, pipeline.is_split and place > 0)
                found[member] = max(found.get(member, 0), sum(parts.values()))
        return found

    def largest_part(self, plan: PipelinePlan, member: str) -> str:
        """Return the part that takes most of a member's memory under a plan."""
        found: dict[str, int] = {}
        for pipeline in (each for each in plan.pipelines if member in each.members):
            place, cuts = pipeline.members.index(member), (0, *pipeline.cuts, plan.blocks)
            stretch = (cuts[place], cuts[place + 1])
            parts = self._parts(member, stretch, pipeline.share)
            in_flight = min(pipeline.limits[place], pipeline.share * self.run_length)
            parts["activations"] = in_flight * self._each_bytes(stretch, pipeline.is_split and place > 0)
            found = {part: max(size_bytes, found.get(part, 0)) for part, size_bytes in parts.items()}
        return max(found, key=lambda part: found[part])

    def most_in_flight(self, member: str, stretch: Stretch, share: int, *, is_split: bool = False) -> int | Shortage:
        """Return the most micro-batches that the member may have in flight between two cuts, at least 1."""
        limit_bytes = self.memory.limits_bytes.get(member)
        if limit_bytes is None:
            return share * self.run_length + 1
        # Candidates that differ in their limits only ask the same again.
        key = (member, stretch, share, is_split)
        if key not in self._known:
            self._known[key] = self._most_in_flight(member, stretch, share, is_split=is_split)
        return self._known[key]

    @cached_property
    def _known(self) -> dict[object, int | Shortage]:
        return {}

    def _most_in_flight(self, member: str, stretch: Stretch, share: int, *, is_split: bool) -> int | Shortage:
        limit_bytes = self.memory.limits_bytes[member]
        parts = self._parts(member, stretch, share)
        each_bytes = self._each_bytes(stretch, is_split)
        # At least one micro-batch must be in flight, or the member could never begin.
        left_bytes = limit_bytes - sum(parts.values())
        if left_bytes < each_bytes:
            parts["activations"] = each_bytes
            return Shortage(
                member=member, missing_bytes=each_bytes - left_bytes, part=max(parts, key=lambda p: parts[p])
            )
        return left_bytes // each_bytes if each_bytes else share * self.run_length + 1

    def _each_bytes(self, stretch: Stretch, is_split: bool) -> int:
        """Return what one micro-batch in flight takes."""
        begin, end = _begin(stretch[0]), _end(stretch[1])
        # Until its weight gradients are computed, a micro-batch keeps activations, and a gradient for each of them.
        saved_bytes = (1 + is_split) * (self._sums[2][end] - self._sums[2][begin])
        return self.profile.activation_bytes[end] + (0 if self.memory.activations_leave else saved_bytes)

    def _parts(self, member: str, stretch: Stretch, share: int) -> dict[str, int]:
        begin, end = _begin(stretch[0]), _end(stretch[1])
        parameters, gradients, _ = self._sums
        forward, back = self.profile.activation_bytes, self.profile.gradient_bytes
        gradient_bytes = copies_of(share) * (gradients[end] - gradients[begin])
        for bound in (each for each in stretch if isinstance(each, Bound)):
            # Groups of a shared block that are no neighbours keep a partial each.
            # A group is a node of the fold, so its runs are one partial.
            gradient_bytes += min(share, bound.groups) * (gradients[bound.deeper] - gradients[bound.cut])
        held_bytes = parameters[end] - parameters[begin]
        return {
            "what belongs to no block": self.memory.base_bytes.get(member, 0),
            "parameters": held_bytes,
            "optimizer states": round(held_bytes * self.memory.state_per_parameter),
            "gradients": gradient_bytes,
            "boundary tensors": share * self.run_length * (forward[end] + back[begin]),
        }


def plan_name(cuts: Cuts) -> str:
    """Return the name of a pipeline for people: its members, and where it is cut."""
    where = ", ".join(f"{cut if isinstance(cut, int) else cut.position:.3g}" for cut in cuts)
    return f"pipelines of {len(cuts) + 1}, cut before blocks {where}" if cuts else "pipelines of 1"


def shortage_text(member: str, missing_bytes: int, part: str, plan: str) -> str:
    """Return a clause that names member, missing bytes, part, and the plan that comes nearest."""
    return f"{member} lacks {mib(missing_bytes)} in the plan that comes nearest ({plan}), where {part} take most"


def memory_of(room: PlanRoom, told: Mapping[str, ToldMemory], present: PipelinePlan) -> PlanMemory:
    """Return the memory of the members that have told it. `room` has the bytes of blocks; its limits do not count."""
    limits, base, taken = dict[str, int](), dict[str, int](), room.taken_bytes(present)
    for member, its in told.items():
        # What the count here leaves out is taken for a part that belongs to no block.
        room_bytes = its.limit_bytes - max(its.base_bytes, its.taken_bytes - taken.get(member, 0))
        # Rounded, so that members with about the same room count as equal, and noise is no lack.
        room_bytes -= room_bytes % (1 << max(0, room_bytes.bit_length() - ROOM_BITS))
        # The plan in force has room: it is being computed.
        limits[member], base[member] = its.limit_bytes, its.limit_bytes - max(taken.get(member, 0), room_bytes)
    return replace(
        room.memory,
        limits_bytes=limits,
        base_bytes=base,
        activations_leave=all(its.activations_leave for its in told.values()),
        may_split=not any(its.has_limit for its in told.values()),
    )


def copies_of(runs: int) -> int:
    """Return the most copies of a gradient that so many consecutive runs need, wherever they begin.

    Runs that are computed wait as partials of the fold, one for each aligned group of 1, 2, 4, … runs, while another
    one is computed. The groups of a stretch get larger first, and then smaller.
    """
    partials = 0
    while runs:
        half, has_middle = divmod(partials + 1, 2)
        # The shortest stretch of so many groups: 1, 2, …, 2, 1, with a larger one in the middle if their number is odd.
        if (2 << half) - 2 + has_middle * (1 << half) > runs - 1:
            return partials + 1
        partials += 1
    return 0


def _begin(cut: int | Bound) -> int:
    return cut if isinstance(cut, int) else cut.cut


def _end(cut: int | Bound) -> int:
    return cut if isinstance(cut, int) else cut.deeper
