"""When a plan is made, of what, and what activations may take of the one limit at each point."""

from __future__ import annotations

from collections.abc import Sequence

from elastrain.offload.device import Device
from elastrain.offload.hooks import ActivationOffload
from elastrain.offload.lifetimes.conductor import Carried, Conductor
from elastrain.offload.lifetimes.orders import Arranged, Arrival, StepStage, UpdateOrder, arrange
from elastrain.offload.lifetimes.plan import make_plan
from elastrain.offload.lifetimes.program import needs_of
from elastrain.offload.lifetimes.states import BlockStates
from elastrain.offload.lifetimes.values import Budget, Kind, LimitBelowLeastError, Plan, Tier
from elastrain.offload.records import SpillRecord

STEPS_BEFORE_A_PLAN = 2
"""The first step makes gradients and optimizer states; the second one shows how long a step takes."""
LEAST_SHARE = 8
"""Activations always have this part of the limit: what is computed with needs some of them in any case."""


class Planning:
    """Makes the plan after some steps, and anew when steps look different."""

    def __init__(
        self,
        limit_bytes: int,
        states: BlockStates,
        conductor: Conductor,
        offload: ActivationOffload,
        devices: Sequence[Device],
    ) -> None:
        self.order = UpdateOrder.AFTER_BACKWARD
        self.reason = "no step was seen yet: everything is read when it is needed"
        self._limit_bytes = limit_bytes
        self._states = states
        self._conductor = conductor
        self._offload = offload
        self._devices = devices
        self._steps = 0
        self._records: set[int] = set()
        self._basis: list[tuple[str, int]] = []
        self._allowed: dict[tuple[StepStage, int], int] = {}

    def forward_begins(self) -> None:
        """Another forward: what it saves is new."""
        self._records.clear()

    def is_new(self, record: SpillRecord) -> bool:
        """Whether a storage is saved for the first time in this forward."""
        known = id(record) in self._records
        self._records.add(id(record))
        return not known

    def before_point(self, stage: StepStage, block: int) -> None:
        """Let activations take what the plan leaves them at a point."""
        allowed = self._allowed.get((stage, block))
        if allowed is not None:
            self._offload.set_memory_limit(allowed)

    def step_ended(self) -> None:
        """A step is over: plan, if what was seen is another step than the one planned for."""
        seen, self._conductor.seen = self._conductor.seen, []
        self._steps += 1
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
            )
            for device in self._devices
        )
        budget, found = Budget(limit_bytes=self._limit_bytes, tiers=tiers), list[tuple[Arranged, Plan]]()
        for order in UpdateOrder:
            arranged = arrange(self._states.sizes(), seen, order)
            try:
                found.append((arranged, make_plan(arranged.program, budget)))
            except LimitBelowLeastError as error:
                self.reason = f"no plan: {error}"
        if not found:
            return
        arranged, plan = min(found, key=lambda each: each[1].played.step_s)
        self.order, self.reason = arranged.order, f"updates {arranged.order.value}: {plan.reason}"
        self._conductor.carried = Carried(arranged, plan)
        self._allow(arranged, plan)

    def _allow(self, arranged: Arranged, plan: Plan) -> None:
        """Activations may take what pieces leave at each point: one account for both."""
        held = needs_of(plan, lambda index: arranged.pieces[index][0] is not Kind.ACTIVATION)
        least = self._limit_bytes // LEAST_SHARE
        self._allowed = {
            point: max(least, self._limit_bytes - taken) for point, taken in zip(arranged.points, held, strict=True)
        }
