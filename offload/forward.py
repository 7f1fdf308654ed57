"""Spills of a forward: storages leave, and the forward waits for their writes, before the next one is saved.

Everything here runs with the manager's lock held; waiting lets go of it. What leaves is decided by the plan and the
limit, in the order of saving.
"""

from __future__ import annotations

from elastrain.offload import residency
from elastrain.offload.account import Account
from elastrain.offload.deferred import DeferredLock
from elastrain.offload.errors import SpillWriteError
from elastrain.offload.limit import SpillLimit
from elastrain.offload.mover import Mover
from elastrain.offload.passes import Pass, Passes
from elastrain.offload.waits import BoundedWait


class ForwardSpiller:
    """Keeps a forward within the limit."""

    def __init__(
        self, lock: DeferredLock, limit: SpillLimit, passes: Passes, mover: Mover, account: Account, wait: BoundedWait
    ) -> None:
        self._lock, self._limit, self._passes = lock, limit, passes
        self._mover, self._account, self._wait = mover, account, wait

    def make_room(self, current: Pass) -> None:
        """Wait until the next storage fits, too: it will be in memory before anybody can ask for room for it.

        Raises SpillWriteError where a device does not take what has to leave.
        """
        if self._limit.limit_bytes is None or self._account.live_bytes <= self._wanted_bytes(current):
            return
        began_s = self._wait.clock()
        until_s = self._wait.until_s(began_s)
        # The limit may change while this waits: what is wanted is asked for anew each time.
        while self._account.live_bytes > (wanted_bytes := self._wanted_bytes(current)):
            self._spill_more(wanted_bytes)
            if not self._mover.writing_bytes:
                break
            self._wait.wait(until_s, SpillWriteError, "writing activations")
        stalled_s = self._wait.clock() - began_s
        current.measured.save_stall_s += stalled_s
        self._passes.totals.save_stall_s += stalled_s
        if self._account.live_bytes > self._limit.limit_bytes:
            self._mover.raise_write_fault(full_too=True)
            self._limit.at_least(self._account.live_bytes)

    def passed_bytes(self, index: int, size_bytes: int) -> int:
        """How much is live if the storage that was just saved went beyond a limit that could never have held it.

        0 where a drive or a backward at the same time is the cause.
        """
        if self._mover.faults or any(each.in_backward for each in self._passes):
            return 0
        return self._limit.passed_bytes(live_bytes=self._account.live_bytes, index=index, size_bytes=size_bytes)

    def _wanted_bytes(self, current: Pass) -> int:
        return self._limit.before_next_bytes(current.measured.largest_bytes)

    def _spill_more(self, wanted_bytes: int) -> None:
        for record in self._passes.records():
            if self._account.live_bytes - self._mover.writing_bytes <= wanted_bytes:
                return
            if record.disk.fault is None and not record.held:
                self._mover.apply(record, residency.Spill())
                self._lock.act()
