"""The decision when a plan is made, and from which step."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from elastrain.offload.drives.device import Device
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.lifetimes.block_states import BlockStates
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.pieces.process_heap import FreedMemory
from elastrain.offload.planning.orders import SeenStep, StepStage, UpdateOrder
from elastrain.offload.planning.plan_search import (
    Changed,
    ChosenPlan,
    Patience,
    Policy,
    choose,
    difference,
    gains_by_keeping,
    holes_at_most,
    with_room_for_freed,
)
from elastrain.offload.planning.plan_values import LimitBelowLeastError, Tier, UnplayableError
from elastrain.offload.planning.profile import StepProfile
from elastrain.offload.planning.program import Carried

STEPS_BEFORE_A_PLAN = 2
"""Steps before the first plan. The first one makes gradients and optimizer states; the second is measured."""

AHEAD_LATENCY_S = 0.008
"""Latency of tiers on a device, in seconds. The host works a point ahead, and learns late that a move ended.

Without it, the device waits for the host.
"""


class Planning:
    """The planner of a training.

    It plans after some steps, again after the first step under the plan, and when steps differ. A step counts as
    different only after it has differed for a while. From the second plan on, freed memory stays in the heap if there
    is room.
    """

    def __init__(
        self, limit_bytes: int, states: BlockStates, conductor: Conductor, devices: Sequence[Device], freed: FreedMemory
    ) -> None:
        self.policy = Policy()
        self.order = UpdateOrder.AFTER_BACKWARD
        self.reason = "no step was seen yet: everything is read when it is needed"
        self._limit_bytes = limit_bytes
        self._states = states
        self._conductor = conductor
        self._devices = devices
        self._freed = freed
        self._patience = Patience()
        self._basis: tuple[SeenStep, tuple[Tier, ...]] | None = None
        self._is_first = True  # True if the plan was made from a step that had no plan
        self._last: SeenStep | None = None  # the last step whose memory was measured at every point

    def step_ended(self) -> None:
        """Process the end of a step, and make a plan if it differs from the planned step. Raises LimitTooSmallError."""
        known = self._conductor.known
        if self._freed.stays and known.came_near:
            self._freed.give_back()
            self._is_first = True
        held_bytes = known.unknown_bytes
        seen = self._conductor.begin_step()
        for device in self._devices:
            device.writes.mark()
            device.reads.mark()
        # A step whose updates are still due, the first one of its kind, shows nothing about updates.
        is_whole = any(each.stage is StepStage.UPDATE for each in seen)
        if not is_whole or (self._basis is None and self._conductor.steps < STEPS_BEFORE_A_PLAN):
            return
        step = SeenStep(blocks=tuple(self._states.sizes()), points=tuple(seen))
        if all(each.standing is not None for each in seen):
            self._last = step
        if self._basis is None:
            self._plan(step, held_bytes)
        else:
            self._renew(step, held_bytes, *self._basis)

    def profile(self) -> StepProfile | None:
        """Return a measured step and its plan, or None before the first plan."""
        carried = self._conductor.carried
        if carried is None or self._basis is None or self._last is None:
            return None
        return StepProfile(
            limit_bytes=self._limit_bytes, tiers=self._basis[1], seen=self._last, order=self.order, plan=carried.plan
        )

    def _renew(self, step: SeenStep, held_bytes: int, planned: SeenStep, tiers: tuple[Tier, ...]) -> None:
        found = difference(planned, step, tiers, self._tiers())
        if self._is_first and (found is None or found.changed is Changed.TIMES):
            # This is the same step under a plan: from now on, drives and computing disturb each other as they do here.
            self._is_first = False
            with contextlib.suppress(LimitTooSmallError, UnplayableError):
                self._plan(step, held_bytes)
            return
        if not self._patience.is_over(found) or found is None:
            return
        before = self.reason
        try:
            self._plan(step, held_bytes)
        except (LimitTooSmallError, UnplayableError) as error:
            # The present step runs without a plan that fits: its pieces are served on demand.
            self._basis, self.reason = (step, self._tiers()), f"{before}; kept, although {found.reason}: {error}"
            return
        self.reason = f"planned anew, since {found.reason}: {self.reason}"

    def _plan(self, step: SeenStep, held_bytes: int) -> None:
        tiers = self._tiers()
        try:
            choice = choose(step, self._limit_bytes, tiers, self.policy)
        except LimitBelowLeastError as error:
            raise LimitTooSmallError(self._limit_bytes, error.least_bytes, error.point) from error
        if self._basis is not None and self._freed.can_stay and self.policy.keep_freed:
            choice = self._beside_freed(step, tiers, held_bytes, choice)
        self._basis = step, tiers
        self.order = choice.arranged.order
        stays = "freed memory stays in the heap; " if self._freed.stays else ""
        self.reason = f"{stays}updates {self.order.value}: {choice.plan.reason}"
        # Reads ahead may use all of the limit; the plan's margin counts as held.
        self._conductor.carry(Carried(choice.arranged, choice.plan), self._limit_bytes - choice.usable_bytes)

    def _beside_freed(self, step: SeenStep, tiers: tuple[Tier, ...], held_bytes: int, other: ChosenPlan) -> ChosenPlan:
        """Return a plan that leaves room for freed memory in the heap, if it is fast enough; else return `other`.

        `held_bytes` are the unknown bytes that the process held in this step. Those beyond the plan's `outside_bytes`
        are unused heap memory.
        """
        holes_bytes = max(0, held_bytes - other.outside_bytes) if self._freed.stays else holes_at_most(step)
        kept = with_room_for_freed(step, self._limit_bytes, tiers, self.policy, holes_bytes)
        if kept is not None and gains_by_keeping(kept, other):
            self._is_first = not self._freed.stays  # computing will be faster
            self._freed.keep()
            return kept
        if self._freed.stays:
            self._freed.give_back()
        return other

    def _tiers(self) -> tuple[Tier, ...]:
        return tuple(
            Tier(
                name=device.engine.name,
                read_bytes_per_s=device.reads.recent_bytes_per_s,
                write_bytes_per_s=device.writes.recent_bytes_per_s,
                latency_s=AHEAD_LATENCY_S if self._conductor.runs_ahead else 0.0,
                capacity_bytes=device.quota_bytes,
                is_memory=isinstance(device.engine, HostEngine),
                duplex=isinstance(device.engine, HostEngine),
            )
            for device in self._devices
        )
