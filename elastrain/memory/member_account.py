"""The account of one member's memory: what it holds under a plan, and what of that fits into a limit. Pure.

The keeper of a worker asks it at run time, with what it has measured. `elastrain doctor --memory` asks it for every
member of a job that has not started.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from elastrain.buffers.background import BEHIND_BYTES
from elastrain.job.placement import Holders, Placement
from elastrain.job.values import Shape
from elastrain.job.world import View
from elastrain.memory import held_shards
from elastrain.memory import memory_budget as budget
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.pipeline_memory import Lack, Load, ModelBytes, TaskBytes, advice, task_bytes


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """Sizes of a job's model that `Shape` does not have. They are the same on every member."""

    frozen: frozenset[int] = frozenset()
    """Shards that get no gradients."""
    masters: bool
    """True if primaries keep parameters of more precision than the model's."""
    slot_bytes: int
    """One copy of all gradients."""
    whole_bytes: int
    """Parameters and running statistics of all blocks."""
    memory: MemoryKind = MemoryKind.ONE
    """The memory of a member that is accounted for."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A member's memory limit, and the drives for what exceeds it."""

    limit_bytes: int
    has_disk: bool
    outside: budget.Outside = field(default_factory=budget.Outside)
    """The drives, if there are any, and in a job on a device the tier of host memory above them."""

    def fit(self, needs: budget.Needs, memory: MemoryKind) -> budget.Fit | budget.Shortfall:
        """Decide what stays in the memory that is limited."""
        outside = self.outside if self.has_disk else None
        return budget.fit_plan(self.limit_bytes, needs, outside=outside, memory=memory)


class Decision(NamedTuple):
    """The decision about a member's needs: the part that stays in memory, or the reason why they do not fit."""

    needs: budget.Needs
    """The needs that were decided about: those of the plan, or those at the end of the loop."""
    fit: budget.Fit | budget.Shortfall
    has_room_for_all: bool
    """True if there is room for all blocks, which a member of a pipeline gets at the end of the loop."""

    def settled(self, limit_bytes: int, last: budget.Fit, most_bytes: int | None) -> Decision:
        """Return the decision about a new plan, by what the last step has held and what the plan takes more.

        Args:
            limit_bytes: The memory limit.
            last: The limits that the last step has kept to.
            most_bytes: Most bytes of the plan by that step's peak, or None if none was measured.
        """
        if isinstance(self.fit, budget.Fit) or not most_bytes:
            return self
        activations_bytes = self.needs.activations_bytes
        past = budget.Measured(kept_to=last, peak_bytes=most_bytes, activations_bytes=activations_bytes)
        return self._replace(fit=budget.settle(limit_bytes, self.fit, past))


@dataclass(frozen=True, kw_only=True)
class MemberAccount:
    """The memory of member `me` under one plan, or one of its two memories in a job on a device."""

    me: str
    shape: Shape
    sizes: ModelSizes
    view: View
    placements: tuple[Placement, Placement]
    """Present holders of the shards, and those to come."""
    slots: int = 0
    """Copies of all gradients that the runs of a step need; 0 in pipelines."""
    is_checked: bool = False
    """True if this member also computes a micro-batch of a neighbour in this step, whatever audits ask for."""
    is_fresh: bool = False
    """True before the first update: there is no optimizer state yet, and no update to verify."""
    pipeline: tuple[ModelBytes, Load] | None = None
    """The traced model, and this member's tasks of a step; None without pipelines, and before tasks are assigned."""
    moments: float | tuple[float, ...] = budget.ASSUMED_MOMENTS
    """The optimizer's own state, in units of the parameters': for all shards, or for each."""
    copied_bytes: int = 0
    """Parameters that may be on their way to new holders at once."""
    is_over: bool = False
    """True once this member's loop has ended."""

    def on_host(self) -> MemberAccount:
        """Return the account of the host's memory in a job on a device."""
        return replace(self, sizes=replace(self.sizes, memory=MemoryKind.HOST))

    @cached_property
    def held(self) -> tuple[held_shards.Held, ...]:
        """The shards that this member holds in the memory that is accounted for, now or later."""
        return self._held_here(self.moments)

    def _held_here(self, moments: float | tuple[float, ...]) -> tuple[held_shards.Held, ...]:
        return tuple(part for each in self._held(moments) if (part := each.on(self.sizes.memory)) is not None)

    def _held(self, moments: float | tuple[float, ...]) -> tuple[held_shards.Held, ...]:
        def under(*placements: Placement) -> tuple[held_shards.Held, ...]:
            masters, frozen = self.sizes.masters, self.sizes.frozen
            return held_shards.held_by(self.me, placements, sizes, moments=moments, masters=masters, frozen=frozen)

        sizes, (now, goal) = self.shape.sizes, self.placements
        # Shards that keep their holders change roles in one commit. The others do so one by one, as copies arrive.
        stay = {shard for shard, its in enumerate(zip(now, goal, strict=True)) if set(its[0].all) == set(its[1].all)}
        both = (each for each in under(now, goal) if each.shard not in stay)
        roles = ([each for each in under(placement) if each.shard in stay] for placement in (now, goal))
        return (*both, *max(roles, key=lambda held: sum(each.leaves_bytes for each in held)))

    def standby(self, spare_bytes: int) -> frozenset[int]:
        """Return the shards held as a backup whose states leave the device at once if this member takes them over.

        After a loss a backup becomes primary before a plan makes room. `spare_bytes`: what is free for such states.
        """
        # Any backup may be the next primary, if several members are lost at once.
        mine = {each.shard for each in self.held}
        now, sizes = self.placements[0], self.sizes
        backed = tuple(Holders(self.me if self.me in holders.backups else "") for holders in now)
        taken = held_shards.held_by(
            self.me, [backed], self.shape.sizes, moments=self.moments, masters=sizes.masters, frozen=sizes.frozen
        )
        parts = [each for each in taken if each.shard not in mine]
        return held_shards.choose_shards(parts, sum(each.leaves_bytes for each in parts) - spare_bytes)[0]

    @cached_property
    def tasks(self) -> TaskBytes:
        """Needs of the tasks. Zero without pipelines, and before tasks are assigned."""
        if self.pipeline is None:
            return TaskBytes()
        model, load = self.pipeline
        return task_bytes(model, replace(load, copies_received=len(set(self.view.nodes.values())) > 1))

    @property
    def gradients_bytes(self) -> int:
        """Bytes of slots, sums, kept gradients and scratch of updates."""
        if self.is_over:
            return 0
        # With `--stages auto` any number of pipelines may follow.
        stages = (self.shape.pipelining.stages if self.shape.pipelining is not None else 1) or 1
        # One more than replicas: after a loss, another member takes over some runs of a block.
        makers = min(len(self.view.members), len(self.view.members) // stages + 1)
        slots_bytes = self.slots * self.sizes.slot_bytes + self.tasks.gradients_bytes
        if self.sizes.memory == MemoryKind.HOST:  # copies of what this member offers, which stay until the commit
            published_bytes = sum(each.gradient_bytes for each in self._held(self.moments) if each.is_primary)
            carried_bytes = slots_bytes + published_bytes if len(self.view.members) > 1 else 0
            return carried_bytes + held_shards.kept_gradients_bytes(self.held)
        if self.sizes.memory == MemoryKind.DEVICE:
            return slots_bytes + held_shards.device_sums_bytes(self._held(self.moments), makers)
        return slots_bytes + held_shards.sums_bytes(self.held, makers, BEHIND_BYTES)

    def surplus_bytes(self, slots_bytes: int, others_bytes: int) -> int:
        """Return the bytes of gradients' memory that a member has besides those of the plan.

        Args:
            slots_bytes: Bytes of the slots that it has.
            others_bytes: Bytes of its sums, scratch and checks.
        """
        # One by one, because free slots are no use for sums, and the other way round.
        planned_bytes = self.slots * self.sizes.slot_bytes
        others_planned_bytes = self.gradients_bytes - planned_bytes
        return max(0, slots_bytes - planned_bytes) + max(0, others_bytes - others_planned_bytes)

    @cached_property
    def copying_bytes(self) -> int:
        """Bytes of the copies that are on their way to new holders, at the giver and at the receiver."""
        if self.sizes.memory == MemoryKind.HOST:
            return 0
        shards = zip(self.shape.sizes, *self.placements, strict=True)
        new_bytes = sum(size for size, now, goal in shards if set(goal.all) - set(now.all))
        return round(2 * min(self.copied_bytes, new_bytes) * self._state_per_parameter)

    @property
    def _state_per_parameter(self) -> float:
        return 1 + (max(self.moments, default=0.0) if isinstance(self.moments, tuple) else self.moments)

    def needs(self, *, base_bytes: int, parameters_bytes: int) -> budget.Needs:
        """Return the needs of the plan. `base_bytes`: what the process holds besides, and `parameters_bytes`."""
        shards_bytes, least_bytes = held_shards.shards_bytes(self.held)
        if self.sizes.memory == MemoryKind.HOST:
            # On its way through host memory is one backup, which counts twice here.
            least_bytes = max((each.leaves_bytes for each in self.held), default=0)
            return budget.Needs(
                base_bytes=base_bytes,
                parameters_bytes=parameters_bytes,
                gradients_bytes=self.gradients_bytes,
                shards_bytes=shards_bytes,
                shards_least_bytes=least_bytes,
                activations_bytes=0,
                activations_least_bytes=0,
                boundaries_bytes=self.tasks.boundaries_bytes,
            )
        is_audited = self.shape.cross_check_every > 0 or self.shape.audit.every > 0
        is_checked = (self.is_checked or is_audited) and self.slots > 0 and len(self.view.members) > 1
        # A fresh backup has parameters, and a fresh primary masters.
        fresh = ((h.leaves_bytes if h.is_primary else h.leaves_bytes // 2) for h in self._held_here(0.0))
        return budget.Needs(
            base_bytes=base_bytes,
            parameters_bytes=parameters_bytes,
            gradients_bytes=self.gradients_bytes + self.copying_bytes,
            shards_bytes=shards_bytes,
            shards_least_bytes=least_bytes,
            activations_bytes=self.tasks.activations_bytes,
            activations_least_bytes=0,
            is_measured=False,
            boundaries_bytes=self.tasks.boundaries_bytes,
            check_bytes=self.sizes.slot_bytes if is_checked else 0,
            shards_at_check_bytes=sum(fresh) if self.is_fresh and not is_audited else shards_bytes,
        )

    def with_copies(self, limit_bytes: int, needs: budget.Needs) -> MemberAccount:
        """Return the account with as many copies on their way as fit beside the needs without copies."""
        members, sizes = len(self.view.members), self.shape.sizes
        copied_bytes = budget.copy_budget(limit_bytes - needs.total_bytes, sizes, members * self._state_per_parameter)
        return replace(self, copied_bytes=copied_bytes)

    def decide(self, needs: budget.Needs, limit: Limit, measured: budget.Measured | None = None) -> Decision:
        """Decide what of these needs stays in memory. `measured`: the last step under the plan; None for a new plan."""
        decided = limit.fit(needs, self.sizes.memory)
        if measured is not None:
            decided = budget.settle(limit.limit_bytes, decided, measured, self.sizes.memory)
        model_bytes = 0 if self.sizes.memory == MemoryKind.HOST else self.sizes.whole_bytes
        whole = budget.at_the_end(needs, model_bytes, self.copying_bytes)
        ended = limit.fit(whole, self.sizes.memory)
        if isinstance(decided, budget.Shortfall):
            advice = self._advice(needs, decided.missing_bytes, activations_leave=limit.has_disk)
            decided = replace(decided, reason=decided.reason + advice)
        # Rank 0 must have room for the whole model at the end; the other members may do without it.
        elif measured is None and isinstance(ended, budget.Shortfall) and self.view.ids[0] == self.me:
            needs, decided = whole, replace(ended, reason=ended.reason + budget.AT_THE_END)
        return Decision(needs, decided, isinstance(ended, budget.Fit))

    def _advice(self, needs: budget.Needs, missing_bytes: int, *, activations_leave: bool) -> str:
        """Return advice on what would fit if the tasks of a pipeline do not, or "" if there are no tasks."""
        if self.is_over:
            return budget.AT_THE_END
        if self.pipeline is None or not self.pipeline[1].tasks:
            return ""
        whole_bytes, leaving_bytes = self.sizes.whole_bytes, self.tasks.activations_bytes if activations_leave else 0
        lack = Lack(
            members=len(self.view.members),
            left_bytes=needs.parameters_bytes + self.tasks.total_bytes - leaving_bytes - missing_bytes,
            missing_bytes=missing_bytes,
            activations_leave=activations_leave,
            # Until the first commit each member has the whole model, as its script has made it.
            parameters_bytes=whole_bytes if needs.parameters_bytes >= whole_bytes else None,
        )
        return f"; {advice(*self.pipeline, lack)}"
