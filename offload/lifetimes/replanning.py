"""When a plan is made, and of what."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from elastrain.offload.drives.device import Device
from elastrain.offload.drives.host import HostEngine
from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.lifetimes.block_states import BlockStates
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.pieces.process_heap import FreedMemory
from elastrain.offload.planning.orders import StepStage, UpdateOrder
from elastrain.offload.planning.plan_search import (
    Changed,
    ChosenPlan,
    Patience,
    Policy,
    SeenStep,
    choose,
    difference,
    gains_by_keeping,
    holes_at_most,
    with_room_for_freed,
)
from elastrain.offload.planning.plan_values import LimitBelowLeastError, Tier, UnplayableError
from elastrain.offload.planning.program import Carried
from elastrain.offload.planning.step_profile import StepProfile

STEPS_BEFORE_A_PLAN = 2
"""The first step makes gradients and optimizer states; the second one shows how long a step takes."""

AHEAD_LATENCY_S = 0.008
"""The host asks a device a point ahead, and hears late of what was moved. Without it, the device waits for the host."""


class Planning:
    """Makes the plan after some steps, again of the first step under it, and anew when steps differ for a while.

    Where there is room, freed memory stays in the heap from the second plan on.
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
        self._is_first = True  # the plan was made of a step that had none
        self._last: SeenStep | None = None  # that was looked at closely

    def step_ended(self) -> None:
        """A step is over: plan, if what was seen is another step than the one planned for."""
        known = self._conductor.known
        if self._freed.stays and known.came_near:
            self._freed.give_back()
            self._is_first = True
        held_bytes = known.unknown_bytes
        seen = self._conductor.begin_step()
        for device in self._devices:
            device.writes.mark()
            device.reads.mark()
        # A step whose updates are still due, the first one of its kind, says nothing of updates.
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
        """What was seen of a step, and its plan; None before there is one."""
        carried = self._conductor.carried
        if carried is None or self._basis is None or self._last is None:
            return None
        return StepProfile(
            limit_bytes=self._limit_bytes, tiers=self._basis[1], seen=self._last, order=self.order, plan=carried.plan
        )

    def _renew(self, step: SeenStep, held_bytes: int, planned: SeenStep, tiers: tuple[Tier, ...]) -> None:
        found = difference(planned, step, tiers, self._tiers())
        if self._is_first and (found is None or found.changed is Changed.TIMES):
            # The same step under a plan: drives and computing disturb each other as they will from now on.
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
            # What runs now does so without a plan that fits: it is served on demand.
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
        # Reads go ahead as far as there is room: the margin is none for them.
        self._conductor.carry(Carried(choice.arranged, choice.plan), self._limit_bytes - choice.usable_bytes)

    def _beside_freed(self, step: SeenStep, tiers: tuple[Tier, ...], held_bytes: int, other: ChosenPlan) -> ChosenPlan:
        """Let freed memory stay in the heap where that leaves a plan that is good enough; else not, and `other`.

        `held_bytes` are what the process held besides in this step: holes are what that is more than plans know of.
        """
        holes_bytes = max(0, held_bytes - other.outside_bytes) if self._freed.stays else holes_at_most(step)
        kept = with_room_for_freed(step, self._limit_bytes, tiers, self.policy, holes_bytes)
        if kept is not None and gains_by_keeping(kept, other):
            self._is_first = not self._freed.stays  # computing will take less
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
