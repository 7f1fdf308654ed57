"""The keeper of a member's host memory in a job on a device: backups leave it for drives under `--host-memory-limit`.

The engine's thread measures and decides, as `MemoryKeeper` does for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elastrain.errors import NoRoomError
from elastrain.memory import held_shards
from elastrain.memory import memory_budget as budget
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import MemberAccount
from elastrain.offload.drives.device import Device
from elastrain.runtime.memory.process_memory import PeakMeter, StepsTaken, limit_captures
from elastrain.runtime.tensors.executor import Executor


class HostKeeper:
    """The host memory of one member.

    Args:
        limit_bytes: Bytes of host memory that this process may hold, the tier above the drives included.
        me: Id of the member.
        executor: Owner of the states.
        meter: Meter of this process's own memory.
        drives: Drives that take backups.
        log: Writes a line into the journal.
    """

    def __init__(
        self,
        limit_bytes: int,
        *,
        me: str,
        executor: Executor,
        meter: PeakMeter,
        drives: Sequence[Device],
        log: Callable[..., None],
    ) -> None:
        self._drives = drives
        self._limit_bytes = limit_bytes
        self._me = me
        self._executor = executor
        self._taken = StepsTaken(meter)
        self._log = log
        self._last: budget.Fit | None = None
        self._accounted_bytes = 0
        """Estimate of what the present plan keeps besides states."""

    def computed(self) -> None:
        """Look at the memory after a micro-batch."""
        self._taken.computed()

    def plan(self, account: MemberAccount) -> None:
        """Make room for a new plan. Raises NoRoomError if it does not fit."""
        self._decide(self._needs(account), account)

    def passed(self, account: MemberAccount) -> None:
        """Measure the memory of the committed step. Raises NoRoomError if it took too much."""
        last = self._last
        if last is None:
            self._taken.pass_over()
            return
        states_bytes = self._executor.backups_bytes()
        peak_bytes = self._taken.add_step(states_bytes + self._accounted_bytes)
        self._log("host_memory", peak_bytes=peak_bytes, backups_bytes=states_bytes)
        measured = budget.Measured(kept_to=last, peak_bytes=peak_bytes, activations_bytes=0)
        self._decide(self._needs(account), account, measured)

    def _needs(self, account: MemberAccount) -> budget.Needs:
        host = account.on_host()
        # Before the first step, nothing of what is estimated is there.
        accounted_bytes = self._accounted_bytes if self._taken.steps else 0
        base_bytes = self._taken.base_bytes(self._executor.backups_bytes() + accounted_bytes)
        return host.needs(base_bytes=base_bytes, parameters_bytes=0)

    def _decide(self, needs: budget.Needs, account: MemberAccount, measured: budget.Measured | None = None) -> None:
        outside = None
        if self._drives:
            outside = budget.Outside(bytes_per_s=sum(each.rate_bytes_per_s() for each in self._drives) or 1.0)
        decided = budget.fit_plan(self._limit_bytes, needs, outside=outside, memory=MemoryKind.HOST)
        if measured is not None:
            decided = budget.settle(self._limit_bytes, decided, measured, MemoryKind.HOST)
        if isinstance(decided, budget.Shortfall):
            self._log("no_room", memory=str(MemoryKind.HOST), reason=decided.reason)
            raise NoRoomError(f"member {self._me}: {decided.reason}")
        last, self._last = self._last, decided
        self._accounted_bytes = needs.gradients_bytes + needs.boundaries_bytes
        free_bytes = self._limit_bytes - needs.total_bytes - self._taken.doubtful_bytes
        limit_captures(self._executor.captures, free_bytes)
        if measured is None or last is None or decided.shards_on_disk_bytes > last.shards_on_disk_bytes:
            held = account.on_host().held
            chosen, which = held_shards.choose_shards(held, decided.shards_on_disk_bytes)
            self._executor.keep_outside(self._drives, chosen, backups=True)
            reason = f"{decided.reason}; {which}" if chosen else decided.reason
            self._log("host_room", reason=reason, backups_on_disk=len(chosen), need_bytes=needs.total_bytes)
