"""The keeper of a member's memory limit: it measures, asks the member's `MemberAccount`, and spills accordingly.

In a job on a device it keeps the limit of the device's memory, and `HostKeeper` that of the host's.

The engine's thread measures and decides, after every step and once a view is in order. The main thread enters
`computing()` around each micro-batch. The decisions themselves are made in `elastrain.memory`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elastrain import protocol as p
from elastrain.decisions.agreed_speeds import speeds_of
from elastrain.device.port import DevicePort
from elastrain.errors import NoRoomError
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Shape
from elastrain.memory import held_shards
from elastrain.memory import memory_budget as budget
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import Decision, Limit, MemberAccount
from elastrain.memory.pipeline_memory import Load
from elastrain.memory.plan_check import told_of
from elastrain.memory.refused_copies import fitted
from elastrain.offload.errors import LimitTooSmallError
from elastrain.offload.planning.profile import Profile
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.runtime.durable.checkpoint_parts import Room
from elastrain.runtime.memory.device_meter import DeviceMeter
from elastrain.runtime.memory.host_keeper import HostKeeper
from elastrain.runtime.memory.planned_work import PlannedWork, bytes_of, measured_needs
from elastrain.runtime.memory.process_memory import (
    HeldInStep,
    MemoryLimit,
    PeakMeter,
    StepsTaken,
    captured_bytes,
    give_freed_memory_back,
    limit_captures,
)
from elastrain.runtime.memory.returning_states import ReturningStates
from elastrain.runtime.memory.spill_places import open_places, with_other_parts
from elastrain.runtime.tensors.executor import Executor

if TYPE_CHECKING:
    from elastrain.comm.wire.mesh import Mesh
    from elastrain.runtime.io.journal import Journal


class MemoryKeeper:
    """The memory of one member. Workers of a node share drives by `run_dir`. Raises ConfigError for bad directories."""

    def __init__(
        self, limit: MemoryLimit, *, me: str, run_dir: Path | None, executor: Executor, mesh: Mesh, journal: Journal
    ) -> None:
        give_freed_memory_back()
        assert limit.limit_bytes is not None
        self._limit_bytes = limit.limit_bytes
        self._executor = executor
        self._journal = journal
        port, host_meter = executor.memory.port, PeakMeter(mesh.memory.resident_bytes)
        self._returning: ReturningStates | None = None
        """States of a job on a device without pipelines, which may be outside of it."""
        self._taken = StepsTaken(host_meter if port.is_host else self._on_device(port))
        self._last: budget.Fit | None = None
        self.work = PlannedWork(me, executor, mesh.memory.trim)
        self._places = open_places(limit, me, run_dir, self._described, port, journal.write)
        self._host = None
        if limit.host_limit_bytes is not None:
            self._host = HostKeeper(
                limit.host_limit_bytes,
                me=me,
                executor=executor,
                meter=host_meter,
                drives=self._places.drives,
                log=journal.write,
            )
        self._needs: budget.Needs | None = None
        self.held = HeldInStep()
        self._share = 1
        """Activations get 1/`_share` of the bytes that are left for them."""

    @property
    def _memory(self) -> MemoryKind:
        return MemoryKind.ONE if self._executor.memory.port.is_host else MemoryKind.DEVICE

    def _on_device(self, port: DevicePort) -> DeviceMeter:
        meter = DeviceMeter(port, self._executor.memory_bytes)
        self._returning = None if self._executor.model.gradients.apart else ReturningStates(self._executor, meter)
        return meter

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Spill activations of the micro-batch inside. Raises NoRoomError if the limit cannot hold its activations."""
        self.work.leftovers.give_back()
        try:
            offload = self._places.offload
            if offload is None:
                yield
                return
            with self.named_errors():
                offload.__enter__()
            try:
                yield
            finally:
                offload.__exit__(None, None, None)
        finally:
            self._taken.computed()
            if self._host is not None:
                self._host.computed()
            self.held.note(gradients_bytes=self._executor.gradients_bytes())

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """Raise NoRoomError, naming the member, if the limit cannot hold the activations of the code inside."""
        try:
            yield
        except LimitTooSmallError as error:
            sizes = {"needed_bytes": error.smallest_bytes, "left_bytes": error.limit_bytes}
            reason = budget.too_small(self._limit_bytes, share=self._share, memory=self._memory, **sizes)
            raise NoRoomError(f"member {self.work.me}: {reason}") from error

    def resumed(self, plan: p.Resumed, shape: Shape, load: Load | None) -> p.CopyBudgetSet:
        """Make room for the plan of a new view. Raises NoRoomError if the plan does not fit.

        Returns the bytes of parameters that may be copied at once, the shards of which no copy has room here, and if
        there is room for all blocks.
        """
        self._taken.begin_view()
        before, account = self.work.account, self.work.resume(plan, shape, load)
        more_bytes = 0
        if self._returning is not None:
            more_bytes = self._returning.begin_view(account)
        elif self._taken.had_settled_before and before is not None and shape.pipelining is None:
            # What the last plan took, as measured, and what this one is expected to take more.
            expected_bytes = max(account.gradients_bytes, before.gradients_bytes)
            more_bytes = self._executor.gradients_bytes() + expected_bytes - before.gradients_bytes
            more_bytes -= account.gradients_bytes
        return self._plan(account, before, more_bytes)

    def begin(self, load: Load | None, placements: tuple[Placement, Placement]) -> p.CopyBudgetSet | None:
        """Make room for the tasks of a pipeline's step if they or the placements changed.

        Returns the same as `resumed`, or None if nothing changed. Raises NoRoomError if they do not fit.
        """
        before = self.work.account
        if before is None:
            return None
        account = self.work.take(load, placements)
        if (account.held, account.tasks) == (before.held, before.tasks):
            return None
        # What was refused may have room now.
        return self._plan(replace(account, placements=placements), before)

    def hold(self, blocks: Sequence[int], *, for_good: bool = False) -> None:
        """Make room for blocks that this member is about to get. Nothing is computed meanwhile.

        `for_good`: the loop has ended, and no task will follow.
        """
        self.work.forget_tasks(for_good=for_good)
        if self.work.account is not None and self._needs is not None:
            gradients_bytes = self.work.account.copying_bytes if for_good else self._needs.gradients_bytes
            needs = replace(self._needs_of(self.work.account), gradients_bytes=gradients_bytes)
            self._decide(replace(needs, parameters_bytes=bytes_of(self._executor.model, blocks)))

    def passed(self, record: Record, placements: tuple[Placement, Placement]) -> p.CopyBudgetSet | None:
        """Measure the memory of the committed step, and make room for the shares of the runs that its record changes.

        placements: holders of the shards by the commit, and those to come.

        Raises NoRoomError if it took too much.
        Returns the same as `resumed` if the room for all blocks changed, else None.
        """
        had_room, account, last_fit = self.work.has_room_for_all, self.work.account, self._last
        if account is None or self._needs is None or last_fit is None:
            self._taken.pass_over()
            return None
        last, tasks, captured = self._places.last_pass(), account.tasks, captured_bytes(self._captures)
        activations_bytes = (
            last.peak_bytes if last is not None else 0 if self._places.is_there else tasks.activations_bytes
        )
        passing_bytes = activations_bytes + tasks.boundaries_bytes
        peak_bytes = self._taken.add_step(self._executor.memory_bytes(), captured, passing_bytes=passing_bytes)
        self.work.leftovers.end()
        self.held.end(peak_bytes, self._executor.model.nbytes, self._executor.states_bytes()[0])
        told = {"activations_bytes": activations_bytes, "captured_bytes": captured.most_bytes}
        self._journal.write("memory", peak_bytes=peak_bytes, **told)
        gradients_bytes = self._needs.gradients_bytes
        if self._taken.has_settled_in_view:
            gradients_bytes = min(gradients_bytes, self._executor.gradients_bytes())
        self.work.account = account = replace(account, is_checked=False)
        if self._returning is not None and (its := self._returning.in_place(account, placements)) is not None:
            self.work.account, account, gradients_bytes = its, its, self._returning.gradients_bytes(its)
            last_fit = replace(last_fit, shards_on_disk_bytes=self._returning.away_bytes(its))
        # The slots of a share that shrinks stay in the pool.
        grown_bytes = max(0, self.work.share(speeds_of(record)).gradients_bytes - account.gradients_bytes)
        account = self.work.account
        needs = replace(self._needs_of(account), gradients_bytes=gradients_bytes + grown_bytes)
        peak_bytes += grown_bytes
        measured = budget.Measured(kept_to=last_fit, peak_bytes=peak_bytes, activations_bytes=activations_bytes)
        self._decide(needs, measured)
        if self._host is not None:
            self._host.passed(account)
        return None if self.work.has_room_for_all == had_room else self._budget(account)

    def has_room_for_any_share(self) -> bool:
        """Return True if the member's limit has room for the gradient slots of any share of the runs."""
        if (needs := self._needs) is None:
            return False
        needed_bytes = needs.least_bytes if self._places.is_there else needs.total_bytes
        return needed_bytes + self.work.growth_bytes <= self._limit_bytes

    def seen(self) -> ToldMemory | None:
        """Return the memory that this member needs under the plan in force, or None before the first decision."""
        return None if self._needs is None else told_of(self._needs, self._limit_bytes, leaves=self._places.is_there)

    def close(self) -> None:
        """Free the space on disk. States that lie there are lost."""
        self._places.tell_states(self._journal.write)
        self._places.close()

    def _plan(self, account: MemberAccount, before: MemberAccount | None, more_bytes: int = 0) -> p.CopyBudgetSet:
        """Decide under a new plan, and refuse copies that have no room. Returns the budget of copies to new holders.

        `more_bytes`: gradients besides those of the account.
        """

        def judge(own: MemberAccount) -> Decision:
            return self._judge(*self._copying(own, more_bytes), before=before)

        account, decision, self.work.refused = fitted(account, judge)
        self.work.account, needs = self._copying(account, more_bytes)
        self._keep_to(decision, needs)
        if self._host is not None:
            self._host.plan(account)
        return self._budget(self.work.account)

    def _copying(self, account: MemberAccount, more_bytes: int) -> tuple[MemberAccount, budget.Needs]:
        """Return the account with as many copies on their way as have room, and its needs."""
        needs = replace(self._needs_of(account), gradients_bytes=account.gradients_bytes + more_bytes)
        account = account.with_copies(self._limit_bytes, needs)
        return account, replace(needs, gradients_bytes=needs.gradients_bytes + account.copying_bytes)

    def _budget(self, account: MemberAccount) -> p.CopyBudgetSet:
        has_room, refused = self.work.has_room_for_all, self.work.refused
        return p.CopyBudgetSet(parameters_bytes=account.copied_bytes, has_room_for_all=has_room, refused=refused)

    def _decide(self, needs: budget.Needs, measured: budget.Measured | None = None) -> None:
        """Decide what stays in memory, and carry it out. Raises NoRoomError if the plan does not fit.

        `measured`: a step under the current plan; None for a new plan.
        """
        assert self.work.account is not None
        decision = self._judge(self.work.account, needs, measured)
        if self._returning is not None and measured is not None and isinstance(decision.fit, budget.Fit):
            is_first = self._needs is not None and not self._needs.is_measured
            fit = self._returning.decided(self._limit_bytes, decision.fit, measured, is_first=is_first)
            decision = decision._replace(fit=fit)
        self._keep_to(decision, needs, measured)

    def _judge(
        self,
        account: MemberAccount,
        needs: budget.Needs,
        measured: budget.Measured | None = None,
        before: MemberAccount | None = None,
    ) -> Decision:
        """Return the decision about the needs of a plan. `before`: the account of the last plan, if this one is new."""
        limit = Limit(limit_bytes=self._limit_bytes, has_disk=self._places.is_there, outside=self._places.outside())
        decision = account.decide(needs, limit, measured)
        if self._last is None or before is None or before.pipeline is None or decision.needs is not needs:
            return decision
        # Gradients that a commit has given back were a part of the peak. The estimate counts them twice.
        return decision.settled(self._limit_bytes, self._last, self.held.most_bytes(needs, before.tasks))

    def _keep_to(self, decision: Decision, needs: budget.Needs, measured: budget.Measured | None = None) -> None:
        """Carry a decision out. Raises NoRoomError if the plan does not fit."""
        account, self._needs = self.work.account, needs
        assert account is not None
        refused, decided, self.work.has_room_for_all = decision
        if isinstance(decided, budget.Shortfall):
            self.work.lack = decided
            self._journal.write("no_room", memory=str(self._memory), reason=decided.reason, **asdict(refused))
            raise NoRoomError(f"member {self.work.me}: {decided.reason}")
        # Captured states get the memory that is certainly free, because activations have their own share. A plan is
        # never refused for bytes that may have been captured states.
        limit_captures(self._captures, self._limit_bytes - needs.total_bytes - self._taken.doubtful_bytes)
        if (
            measured is None
            or (self._returning is not None and self._returning.has_news)
            or decided.is_news(self._last, self._limit_bytes)
            or self._share != self._share_of_activations()
        ):
            self._carry_out(account, decided, needs, is_new=measured is None)

    @property
    def _captures(self) -> Room | None:
        """The memory for captured states, or None if they lie in another memory than the one that is limited."""
        return self._executor.captures if self._memory == MemoryKind.ONE else None

    def _needs_of(self, account: MemberAccount) -> budget.Needs:
        """Return the needs of the plan, with what was measured in place of what was expected."""
        return measured_needs(account, self._executor, self._taken, self._places.last_pass())

    def _share_of_activations(self) -> int:
        """Return 2 until it is measured what computing takes besides saved activations, then 1.

        Two steps are measured, because the second takes more than the first: optimizer state exists then.
        """
        return 1 if self._taken.has_settled else 2

    def _carry_out(self, account: MemberAccount, decided: budget.Fit, needs: budget.Needs, *, is_new: bool) -> None:
        held, last = account.held, None if is_new else self._last
        if self._returning is not None:
            held = self._returning.candidates(held, decided, last)
        outside, which = held_shards.choose_shards(held, decided.shards_on_disk_bytes)
        self._last = decided
        kept = outside
        if self._returning is not None:
            self._returning.carried_out(outside)
            if self._places.drives:
                kept |= account.standby(max(0, self._limit_bytes - needs.total_bytes))
        reason = f"{decided.reason}; {which}" if outside else decided.reason
        self._executor.keep_outside(self._places.drives, kept, tier=self._places.tier)
        if self._places.offload is not None:
            self._share = self._share_of_activations()
            self._places.offload.set_memory_limit(max(1, decided.activations_bytes // self._share))
        self._journal.write(
            "room",
            memory=str(self._memory),
            reason=reason,
            activations_bytes=decided.activations_bytes,
            shards_on_disk=len(outside),
            copies_refused=len(self.work.refused),
            **{f"need_{name}": value for name, value in asdict(needs).items()},
        )

    def _described(self, activations: Profile) -> Profile:
        base_bytes = self._needs.base_bytes if self._needs else 0
        return with_other_parts(activations, self._executor, base_bytes, self._places.drives)
