"""The spill manager: owns saved storages from the forward that saves them to the last graph node that may need them.

Its parts: `pass_records.py` (records of storages and passes), `forward_spills.py` and `backward.py` (spills and reads
within the limit of `saved_limit.py`), and `mover.py` (transfers between memory and devices). One lock guards all
records, and finalizers leave notes with it (`deferred.py`). Methods that change records are `undisturbed`: an interrupt
cannot stop them halfway. No I/O is done here.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from elastrain.offload.activations.backward import BackwardReloader, ReadMemory
from elastrain.offload.activations.deferred import DeferredLock, Watched, undisturbed
from elastrain.offload.activations.forward_spills import (
    NO_OPERATOR,
    ForwardSpiller,
    Hold,
    Holds,
    Operator,
    running_operator,
)
from elastrain.offload.activations.identity import tell_of_claims
from elastrain.offload.activations.mover import Mover
from elastrain.offload.activations.pass_records import Passes, SpillRecord
from elastrain.offload.activations.saved_limit import Account, BoundedWait, SpillLimit
from elastrain.offload.activations.spill_policy import SpillPlan
from elastrain.offload.drives import residency
from elastrain.offload.drives.device import Device
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import SpillReadError
from elastrain.offload.planning.profile import OffloadStats, StorageBytes


class SpillManager:
    """The interface that saved-tensor hooks call. Safe from any thread.

    `plan` says how much to spill, and is notified of each finished pass. `deadline_s` bounds every wait for a device.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        limit_bytes: int | None,
        plan: SpillPlan,
        deadline_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.devices = tuple(devices)
        self._limit = limit = SpillLimit(limit_bytes)
        self._lock = lock = DeferredLock(self._after_notes)
        wait = BoundedWait(lock, deadline_s=deadline_s, clock=clock)
        self._passes = passes = Passes(self.devices, plan, clock)
        self._account = account = Account(lock, lambda: passes.live(account.live_bytes))
        self._memory = ReadMemory(lock, limit, passes)
        self._mover = mover = Mover(self.devices, lock, account, take=self._memory.take, dropped=self._dropped)
        self._holds = Holds(lock, mover)
        self._forward = ForwardSpiller(lock, limit, passes, mover, account, wait)
        self._backward = BackwardReloader(lock, limit, passes, mover, account, wait)
        # A forked child inherits the objects but not the threads; the pid tells the two processes apart.
        self.pid = os.getpid()
        self._end = weakref.finalize(self, _close_all, self.devices, self.pid)

    @property
    def live_bytes(self) -> int:
        """Bytes of saved storages in memory now."""
        self._settle()
        return self._account.live_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes of memory that are kept for the next reads and hold nothing now."""
        self._settle()
        return self._memory.idle_bytes

    @property
    def writing_bytes(self) -> int:
        """Bytes of storages that are being written to devices now."""
        return self._mover.writing_bytes

    def leave(self, records: Iterable[SpillRecord]) -> None:
        """Spill storages at once, or after the operator that may still fill them has returned."""
        self._leave(records, running_operator())

    @undisturbed
    def _leave(self, records: Iterable[SpillRecord], operator: Operator) -> None:
        self._holds.settle(operator)
        with self._lock:
            for record in records:
                if record in self._passes and record.disk.fault is None:
                    record.wants_to_leave = True
                    self._holds.let_leave(record)

    @undisturbed
    def fetch(self, records: Iterable[SpillRecord]) -> None:
        """Start to read spilled storages before backward needs them."""
        with self._lock:
            for record in records:
                if record in self._passes:
                    self._mover.apply(record, residency.Prefetch())

    def settle(self) -> None:
        """Drop all holds of this thread. The caller knows that none of its operators is running."""
        self._holds.settle(Operator(threading.get_ident(), NO_OPERATOR))

    def is_moving(self) -> bool:
        """Return True if a transfer of any storage is under way, or is ending."""
        with self._lock:
            return any(each.state in residency.IN_FLIGHT for each in self._passes.records())

    def give_up(self) -> int:
        """Spill everything that can leave. Returns the bytes that are then being written."""
        self.leave([each for each in self._passes.records() if not each.held])
        return self.writing_bytes

    @undisturbed
    def begin_pass(self) -> None:
        """Begin a pass. Raises `LimitTooSmallError` or `SpillWriteError` if an earlier pass left such an error."""
        with self._lock:
            self._limit.check()
            self._mover.raise_write_fault()
            self._passes.begin()

    @undisturbed
    def end_forward(self, *, quietly: bool) -> None:
        """End the forward. Raises `SpillWriteError` if a device refused a storage, unless `quietly`."""
        self._holds.settle(None)
        with self._lock:
            ended = self._passes.end_forward()
            if quietly:  # an error ended the forward early: its sizes say nothing about the next one
                return
            for each in ended:
                self._limit.foresee(each.measured.largest_bytes)
            self._mover.raise_write_fault()

    @undisturbed
    def save(self, record: SpillRecord, handle: object, operator: Operator | None = None) -> None:
        """Take over a storage. Waits until it fits into the limit.

        A pinned storage never leaves. Others leave at the earliest after the `operator` that saves them has returned.
        The storage is released when the graph node's `handle` is gone.
        """
        storage = record.storage
        assert storage is not None
        tell_of_claims(storage, self)
        self._holds.settle(operator)
        with self._lock:
            current = self._passes.current()
            self._passes.enter(record, current)
            record.handles.add(held := self._lock.watch(handle, self._release, record))
            record.watched.append(self._account.watch(storage))
            index = record.timing.index
            passed_bytes = self._forward.passed_bytes(index, record.size_bytes)
            record.wants_to_leave = self._passes.plan.spills(index)
            if operator is not None and operator.fills:
                self._holds.add(Hold(record, storage, operator, is_shared=False))
            self._holds.let_leave(record)
            try:
                self._forward.make_room(current)
                self._mover.raise_write_fault()
            except BaseException:
                self._release(held)  # no graph node will refer to it
                raise
            self._limit.at_least(passed_bytes)

    @undisturbed
    def share(self, record: SpillRecord, storage: torch.UntypedStorage, handle: object, operator: Operator) -> bool:
        """Register one more graph node for a storage that was saved before.

        Returns False if the storage is gone, or belongs to another manager. An existing copy on a device is compared
        with the memory once the `operator` has returned.
        """
        self._holds.settle(operator)
        with self._lock:
            if record not in self._passes or record.state is State.LEAVING:
                return False
            record.handles.add(self._lock.watch(handle, self._release, record))
            if operator.fills:
                self._holds.add(Hold(record, storage, operator, is_shared=True))
            self._passes.totals.shared_bytes += record.size_bytes
            return True

    @undisturbed
    def claim(self, storage: torch.UntypedStorage) -> None:
        """Stop using a storage that its owner is about to free or overwrite.

        Backward will get its content at that time.
        """
        with self._lock:
            for record in self._passes.saved_in(storage):
                self._backward.claim(record, storage)

    @undisturbed
    def need(self, record: SpillRecord) -> torch.UntypedStorage:
        """Return the storage, in memory, then read ahead as far as there is room.

        Raises `SpillReadError` (or its subclass) if it cannot be read.
        """
        if record.held:
            self._holds.settle_operators_of(record)
        with self._lock:
            if record not in self._passes:
                raise SpillReadError("another process saved this activation: compute the micro-batch again in this one")
            storage = self._backward.need(record)
            self._backward.read_ahead(self._passes.of(record))
            return storage

    @undisturbed
    def set_limit(self, limit_bytes: int) -> None:
        """Set another limit. It applies from the next storage on, which makes memory free for itself."""
        with self._lock:
            self._limit.set(limit_bytes)
            self._passes.plan.set_limit(limit_bytes)
            self._lock.tell()

    @undisturbed
    def close(self) -> None:
        """Close the devices. Storages that are only on a device cannot be read any more."""
        with self._lock:
            self._backward.close()
        self._end()

    @undisturbed
    def stats(self) -> OffloadStats:
        """Return the measurements since this manager was created."""
        with self._lock:
            totals, plan = self._passes.totals, self._passes.plan
            return OffloadStats(
                limit_bytes=self._limit.limit_bytes,
                passes=totals.passes,
                elapsed_s=self._passes.elapsed_s(),
                storages=StorageBytes(
                    live_bytes=self._account.live_bytes,
                    peak_bytes=totals.peak_bytes,
                    saved_bytes=totals.saved_bytes,
                    shared_bytes=totals.shared_bytes,
                    spilled_bytes=self._mover.spilled_bytes,
                    forwarded_bytes=totals.forwarded_bytes,
                    evicted_bytes=totals.evicted_bytes,
                ),
                save_stall_s=totals.save_stall_s,
                need_stall_s=totals.need_stall_s,
                amount=plan.reason,
                faults=tuple(self._mover.faults),
                devices=tuple(device.stats() for device in self.devices),
                last=plan.last,
            )

    def _settle(self) -> None:
        if self._lock.has_notes:
            self.leave(())  # acts on the notes

    # Callbacks of the parts, with the lock held.

    def _after_notes(self) -> None:
        """Use the memory that finalizers may have freed: read ahead, and trim the arena."""
        self._backward.read_ahead_everywhere()
        self._memory.trim()

    def _dropped(self, record: SpillRecord) -> None:
        self._holds.forget(record)
        self._passes.drop(record)

    def _release(self, gone: Watched) -> None:
        """Remove a graph node from its record. The last one releases the record."""
        record: SpillRecord = gone.about
        if gone not in record.handles:
            return
        record.handles.remove(gone)
        if record.handles:
            return
        current = self._passes.release(record)
        self._mover.apply(record, residency.Release())
        self._passes.finish_if_over(current)


def _close_all(devices: Sequence[Device], pid: int) -> None:
    for device in devices if os.getpid() == pid else ():
        device.close()
