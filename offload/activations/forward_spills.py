"""Spills of a forward: storages leave, and the forward waits for their writes, before the next one is saved.

Everything here runs with the manager's lock held; waiting lets go of it. What leaves is decided by the plan and the
limit, in the order of saving.

Holds storages back whose operator may still be running, because it may still fill them.

`nn.RReLU` does so in training: its noise is saved before the kernel fills it, and no version tells. A storage that is
held is neither written nor given up.
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


NO_OPERATOR = -1
"""A number that no operator has."""


class Operator(NamedTuple):
    """An operator that autograd records. All that it saves, it saves under one number; the next one has another.

    `fills` says that it may still fill what it has saved: a compiled program does not.
    """

    thread: int
    number: int
    fills: bool = True


def running_operator(*, fills: bool = True) -> Operator:
    """The operator of this thread that autograd recorded last: while something is being saved, the one that saves."""
    return Operator(threading.get_ident(), torch._C._autograd._get_sequence_nr(), fills)


class Hold(NamedTuple):
    """A storage that `operator` saved. `is_shared`: another one had saved it before, so that there may be a copy."""

    record: SpillRecord
    storage: torch.UntypedStorage
    operator: Operator
    is_shared: bool


class Holds:
    """Keeps the holds in the order of saving; `SpillRecord.held` counts them. The manager's lock guards all."""

    def __init__(self, lock: DeferredLock, mover: Mover) -> None:
        self._lock = lock
        self._mover = mover
        self._holds: list[Hold] = []

    # With the lock held.

    def add(self, hold: Hold) -> None:
        """Keep a storage where it is until its operator has returned: what is in it is not final before."""
        hold.record.held += 1
        self._holds.append(hold)

    def forget(self, record: SpillRecord) -> None:
        """Drop all holds of a record that no graph can ask for any more."""
        if record.held:
            self._take([each for each in self._holds if each.record is record])

    def let_leave(self, record: SpillRecord) -> None:
        """Let a record leave memory if it was to leave and has no hold any more."""
        if record.wants_to_leave and not record.held:
            record.wants_to_leave = False
            self._mover.apply(record, residency.Spill())

    # Without it.

    def settle(self, running: Operator | None) -> None:
        """Let go of what other operators of this thread saved than `running`: they have returned. None: of all."""
        if not self._holds:
            return
        with self._lock:
            returned = self._take([each for each in self._holds if _has_returned(each.operator, running)])
        self._let_go(returned)

    def settle_operators_of(self, record: SpillRecord) -> None:
        """Drop the holds of all operators that saved this storage: backward asks for it, so they have returned."""
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
