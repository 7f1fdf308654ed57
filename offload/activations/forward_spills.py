"""Spills of a forward (`ForwardSpiller`), and storages that may not leave yet (`Holds`).

Before the next storage is saved, the forward waits for writes until it fits into the limit. The manager's lock is held;
a wait releases it. The plan and the limit decide what leaves, in the order of saving.

A storage is held in memory until the operator that saved it has returned, because the operator may still fill it.
`nn.RReLU` in training, for example, saves its noise before the kernel fills it, and no version counter shows that.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from elastrain.offload.activations.deferred import DeferredLock
from elastrain.offload.activations.mover import Mover
from elastrain.offload.activations.pass_records import Pass, Passes, SpillRecord
from elastrain.offload.activations.saved_limit import Account, BoundedWait, SpillLimit
from elastrain.offload.drives import residency
from elastrain.offload.errors import SpillWriteError


class ForwardSpiller:
    """The part of the manager that keeps the saved storages of a forward within the limit."""

    def __init__(
        self, lock: DeferredLock, limit: SpillLimit, passes: Passes, mover: Mover, account: Account, wait: BoundedWait
    ) -> None:
        self._lock, self._limit, self._passes = lock, limit, passes
        self._mover, self._account, self._wait = mover, account, wait

    def make_room(self, current: Pass) -> None:
        """Wait until the next storage will fit too, because it will already be in memory when it is saved.

        Raises SpillWriteError if a device refuses what has to leave.
        """
        if self._limit.limit_bytes is None or self._account.live_bytes <= self._wanted_bytes(current):
            return
        began_s = self._wait.clock()
        until_s = self._wait.until_s(began_s)
        # The limit may change during the wait, so the wanted bytes are computed again each time.
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
        """Return the live bytes if the storage just saved exceeds a limit that can never hold it, else 0.

        Also 0 if a failing drive, or a backward at the same time, is the cause.
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


NO_OPERATOR = -1
"""A sequence number that no operator of autograd has."""


class Operator(NamedTuple):
    """One run of an operator that autograd records.

    All tensors that it saves have its `number`; the next run has another.

    `fills` is True if it may still write into what it has saved. Compiled programs do not.
    """

    thread: int
    number: int
    fills: bool = True


def running_operator(*, fills: bool = True) -> Operator:
    """Return the operator that autograd recorded last in this thread. During a save it is the operator that saves."""
    return Operator(threading.get_ident(), torch._C._autograd._get_sequence_nr(), fills)


class Hold(NamedTuple):
    """A storage that `operator` saved. `is_shared`: another operator had saved it before, so that a copy may exist."""

    record: SpillRecord
    storage: torch.UntypedStorage
    operator: Operator
    is_shared: bool


class Holds:
    """All holds in the order of saving, guarded by the manager's lock.

    `SpillRecord.held` counts the holds of a record.
    """

    def __init__(self, lock: DeferredLock, mover: Mover) -> None:
        self._lock = lock
        self._mover = mover
        self._holds: list[Hold] = []

    # Methods that are called with the lock held.

    def add(self, hold: Hold) -> None:
        """Keep a storage in memory until its operator has returned, because its content is not final before."""
        hold.record.held += 1
        self._holds.append(hold)

    def forget(self, record: SpillRecord) -> None:
        """Drop all holds of a record that no graph can need any more."""
        if record.held:
            self._take([each for each in self._holds if each.record is record])

    def let_leave(self, record: SpillRecord) -> None:
        """Spill a record that is waiting to leave, if it has no hold any more."""
        if record.wants_to_leave and not record.held:
            record.wants_to_leave = False
            self._mover.apply(record, residency.Spill())

    # Methods that are called without the lock.

    def settle(self, running: Operator | None) -> None:
        """Drop the holds of this thread's operators other than `running`, because they have returned.

        None drops all holds.
        """
        if not self._holds:
            return
        with self._lock:
            returned = self._take([each for each in self._holds if _has_returned(each.operator, running)])
        self._let_go(returned)

    def settle_operators_of(self, record: SpillRecord) -> None:
        """Drop the holds of all operators that saved this storage. Backward needs it, so they have returned."""
        with self._lock:
            operators = {each.operator for each in self._holds if each.record is record}
            returned = self._take([each for each in self._holds if each.operator in operators])
        self._let_go(returned)

    def _take(self, taken: Sequence[Hold]) -> Sequence[Hold]:
        if taken:
            gone = set(map(id, taken))
            self._holds = [each for each in self._holds if id(each) not in gone]
        for each in taken:
            each.record.held -= 1
        return taken

    def _let_go(self, returned: Sequence[Hold]) -> None:
        for hold in returned:
            if hold.is_shared and not hold.record.origin.pinned:
                self._mover.compare(hold.record, hold.storage)
        if returned:
            with self._lock:
                for hold in returned:
                    self.let_leave(hold.record)


def _has_returned(operator: Operator, running: Operator | None) -> bool:
    return running is None or (operator.thread == running.thread and operator.number != running.number)
