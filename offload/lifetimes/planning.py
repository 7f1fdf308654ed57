"""When a plan is made, and of what."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from elastrain.offload.device import Device
from elastrain.offload.engines.host import HostEngine
from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.lifetimes.carried import Carried
from elastrain.offload.lifetimes.choice import Policy, SeenStep, choose
from elastrain.offload.lifetimes.conductor import Conductor
from elastrain.offload.lifetimes.orders import StepStage, UpdateOrder
from elastrain.offload.lifetimes.renewal import Changed, Patience, difference
from elastrain.offload.lifetimes.states import BlockStates
from elastrain.offload.lifetimes.step_profile import StepProfile
from elastrain.offload.lifetimes.values import LimitBelowLeastError, Tier, UnplayableError

STEPS_BEFORE_A_PLAN = 2
"""The first step makes gradients and optimizer states; the second one shows how long a step takes."""


class Planning:
    """Makes the plan after some steps, again of the first step under it, and anew when steps differ for a while."""

    def __init__(self, limit_bytes: int, states: BlockStates, conductor: Conductor, devices: Sequence[Device]) -> None:
        self.policy = Policy()
        self.order = UpdateOrder.AFTER_BACKWARD
        self.reason = "no step was seen yet: everything is read when it is needed"
        self._limit_bytes = limit_bytes
        self._states = states
        self._conductor = conductor
        self._devices = devices
        self._steps = 0
        self._patience = Patience()
        self._basis: tuple[SeenStep, tuple[Tier, ...]] | None = None
        self._is_first = True  # the plan was made of a step that had none
        self._last: SeenStep | None = None  # that was looked at closely

    def step_ended(self) -> None:
        """A step is over: plan, if what was seen is another step than the one planned for."""
        seen, self._conductor.seen = self._conductor.seen, []
        for device in self._devices:
            device.writes.mark()
            device.reads.mark()
        self._steps += 1
        self._conductor.steps += 1
        # A step whose updates are still due, the first one of its kind, says nothing of updates.
        is_whole = any(each.stage is StepStage.UPDATE for each in seen)
        if self._steps < STEPS_BEFORE_A_PLAN or not is_whole:
            return
        step = SeenStep(blocks=tuple(self._states.sizes()), points=tuple(seen))
        if all(each.standing is not None for each in seen):
            self._last = step
        if self._basis is None:
            self._plan(step)
        else:
            self._renew(step, *self._basis)

    def profile(self) -> StepProfile | None:
        """What was seen of a step, and its plan; None before there is one."""
        carried = self._conductor.carried
        if carried is None or self._basis is None or self._last is None:
            return None
        return StepProfile(
            limit_bytes=self._limit_bytes, tiers=self._basis[1], seen=self._last, order=self.order, plan=carried.plan
        )

    def _renew(self, step: SeenStep, planned: SeenStep, tiers: tuple[Tier, ...]) -> None:
        found = difference(planned, step, tiers, self._tiers())
        if self._is_first and (found is None or found.changed is Changed.TIMES):
            # The same step under a plan: drives and computing disturb each other as they will from now on.
            self._is_first = False
            with contextlib.suppress(LimitTooSmallError, UnplayableError):
                self._plan(step)
            return
        if not self._patience.is_over(found) or found is None:
            return
        before = self.reason
        try:
            self._plan(step)
        except (LimitTooSmallError, UnplayableError) as error:
            # What runs now does so without a plan that fits: it is served on demand.
            self._basis, self.reason = (step, self._tiers()), f"{before}; kept, although {found.reason}: {error}"
            return
        self.reason = f"planned anew, since {found.reason}: {self.reason}"

    def _plan(self, step: SeenStep) -> None:
        tiers = self._tiers()
        try:
            choice = choose(step, self._limit_bytes, tiers, self.policy)
        except LimitBelowLeastError as error:
            raise LimitTooSmallError(self._limit_bytes, error.least_bytes, error.point) from error
        self._basis = step, tiers
        self.order = choice.arranged.order
        self.reason = f"updates {self.order.value}: {choice.plan.reason}"
        # Reads go ahead as far as there is room: the margin is none for them.
        self._conductor.carry(Carried(choice.arranged, choice.plan), self._limit_bytes - choice.usable_bytes)

    def _tiers(self) -> tuple[Tier, ...]:
        return tuple(
            Tier(
                name=device.engine.name,
                read_bytes_per_s=device.reads.recent_bytes_per_s,
                write_bytes_per_s=device.writes.recent_bytes_per_s,
                capacity_bytes=device.quota_bytes,
                is_memory=isinstance(device.engine, HostEngine),
                duplex=isinstance(device.engine, HostEngine),
            )
            for device in self._devices
        )
