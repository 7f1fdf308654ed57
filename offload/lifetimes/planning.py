"""When a plan is made, and of what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastrain.offload.device import Device
from elastrain.offload.engines.host import HostEngine
from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.lifetimes.carried import Carried
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.orders import Arranged, Arrival, StepStage, UpdateOrder, arrange
from elastrain.offload.lifetimes.plan import make_plan
from elastrain.offload.lifetimes.states import BlockStates
from elastrain.offload.lifetimes.values import Budget, LimitBelowLeastError, Plan, Program, Tier

STEPS_BEFORE_A_PLAN = 2
"""The first step makes gradients and optimizer states; the second one shows how long a step takes."""
MARGIN_SHARE = 0.04
"""What is left free below the limit: the kernel counts in its own units, and later than things happen."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How a plan is made, and of which orders of updates the fastest is taken."""

    make: Callable[[Program, Budget], Plan] = make_plan
    orders: tuple[UpdateOrder, ...] = tuple(UpdateOrder)


class Planning:
    """Makes the plan after some steps, and anew when steps look different."""

    def __init__(
        self,
        limit_bytes: int,
        states: BlockStates,
        conductor: Conductor,
        devices: Sequence[Device],
    ) -> None:
        self.policy = Policy()
        self.order = UpdateOrder.AFTER_BACKWARD
        self.reason = "no step was seen yet: everything is read when it is needed"
        self._limit_bytes = limit_bytes
        self._states = states
        self._conductor = conductor
        self._devices = devices
        self._steps = 0
        self._basis: list[tuple[str, int]] = []

    def step_ended(self) -> None:
        """A step is over: plan, if what was seen is another step than the one planned for."""
        seen, self._conductor.seen = self._conductor.seen, []
        self._steps += 1
        self._conductor.steps += 1
        points = sorted((each.stage.value, each.block) for each in seen)
        # A step whose updates are still due, the first one of its kind, says nothing of updates.
        is_whole = any(each.stage is StepStage.UPDATE for each in seen)
        if self._steps >= STEPS_BEFORE_A_PLAN and is_whole and points != self._basis:
            self._basis = points
            self._plan(seen)

    def _plan(self, seen: Sequence[Arrival]) -> None:
        for device in self._devices:
            device.writes.mark()
            device.reads.mark()
        tiers = tuple(
            Tier(
                name=device.engine.name,
                read_bytes_per_s=device.reads.recent_bytes_per_s,
                write_bytes_per_s=device.writes.recent_bytes_per_s,
                capacity_bytes=device.quota_bytes,
                is_memory=isinstance(device.engine, HostEngine),
            )
            for device in self._devices
        )
        outside_bytes = min(each.extra_bytes for each in seen)
        seen = [replace(each, extra_bytes=each.extra_bytes - outside_bytes) for each in seen]
        usable_bytes = int((1 - MARGIN_SHARE) * self._limit_bytes) - outside_bytes
        budget, found = Budget(limit_bytes=usable_bytes, tiers=tiers), list[tuple[Arranged, Plan]]()
        try:
            for order in self.policy.orders:
                arranged = arrange(self._states.sizes(), seen, order)
                found.append((arranged, self.policy.make(arranged.program, budget)))
        except LimitBelowLeastError as error:
            smallest_bytes = int((error.least_bytes + outside_bytes) / (1 - MARGIN_SHARE)) + 1
            raise LimitTooSmallError(self._limit_bytes, smallest_bytes, error.point) from error
        arranged, plan = min(found, key=lambda each: each[1].played.step_s)
        self.order, self.reason = arranged.order, f"updates {arranged.order.value}: {plan.reason}"
        # Reads go ahead as far as there is room: the margin is none for them.
        self._conductor.carry(Carried(arranged, plan), self._limit_bytes - usable_bytes)
