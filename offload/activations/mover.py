"""Transfers of saved storages between memory and devices. Performs the commands of the residency table.

Methods run with the manager's lock held, except for the reads and writes themselves: the devices' own threads perform
those (`transfer.py`) and report how they ended. `compare` takes the lock itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from elastrain.offload.activations.deferred import DeferredLock
from elastrain.offload.activations.pass_records import SpillRecord
from elastrain.offload.activations.saved_limit import Account
from elastrain.offload.drives import residency, transfer
from elastrain.offload.drives.device import Copy, Device, EndedEarlyError, NoSpaceError
from elastrain.offload.drives.request_queue import IoRequest, Urgency
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import OffloadError, SpillReadError, SpillWriteError


class Mover:
    """Executor of the residency table's commands for all records.

    `take` returns memory for a read; `dropped` is called for storages that are gone for good. `writing_bytes` are being
    written now, `spilled_bytes` were written in total, and `faults` are error messages for users.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        lock: DeferredLock,
        account: Account,
        *,
        take: Callable[[SpillRecord, Copy], torch.UntypedStorage],
        dropped: Callable[[SpillRecord], None],
    ) -> None:
        self.writing_bytes = self.spilled_bytes = 0
        self.faults: list[str] = []
        self._devices = devices
        self._lock = lock
        self._account = account
        self._take = take
        self._dropped = dropped
        self._write_fault: SpillWriteError | None = None

    def apply(self, record: SpillRecord, event: residency.Event) -> tuple[residency.Command, ...]:
        """Apply an event to a storage and perform the resulting commands. I/O is only queued."""
        before = record.state
        record.state, commands = residency.advance(before, event)
        self.writing_bytes += record.size_bytes * ((record.state is State.WRITING) - (before is State.WRITING))
        for command in commands:
            self._perform(record, command)
        if record.state is State.DROPPED and before is not State.DROPPED:
            for watched in record.watched:
                self._account.forget(watched)
            self._dropped(record)
        return commands

    def _perform(self, record: SpillRecord, command: residency.Command) -> None:
        match command:
            case residency.HandBack() | residency.RaiseFault():
                pass  # the caller of `apply` acts on these
            case residency.FreeMemory():
                record.storage = None
            case residency.StartWrite():
                self._start_write(record)
            case residency.StartRead(urgent=urgent):
                self._start_read(record, urgent=urgent)
            case residency.HastenRead():
                device, request = _io_of(record)
                device.queue.hasten(request)
            case residency.CancelWrite() | residency.CancelRead():
                device, request = _io_of(record)
                device.queue.cancel(request)
            case residency.FreeSlot():
                if record.disk.device is not None and record.disk.copy is not None:
                    record.disk.device.free(record.disk.copy.slot)
                record.disk.copy = None

    def raise_write_fault(self, *, full_too: bool = False) -> None:
        """Raise the last write fault, once. A full device is reported only with `full_too`, if a limit is exceeded."""
        fault = self._write_fault
        if fault is None or (isinstance(fault, NoSpaceError) and not full_too):
            return
        if not isinstance(fault, NoSpaceError):
            self._write_fault = None
        raise again(fault)

    # Writing.

    def _start_write(self, record: SpillRecord) -> None:
        able = [each for each in self._devices if each.has_room(record.size_bytes)] or self._devices
        device = min(able, key=lambda each: done_after(each, record.size_bytes))
        device.queued_bytes += record.size_bytes
        record.disk.device, record.disk.was_written = device, True
        self.spilled_bytes += record.size_bytes
        record.disk.request = device.queue.submit(Urgency.WRITE, partial(self._write, record), record.ready)

    def _write(self, record: SpillRecord, request: IoRequest) -> None:
        """Write a storage, in a device's thread. The record's state keeps its memory alive until this has reported."""
        device, storage = record.disk.device, record.storage
        assert device is not None and storage is not None
        event: residency.Event = residency.WriteDone()
        copy, fault = None, None
        may_change = transfer.has_others(storage)
        try:
            if request.cancelled:
                raise EndedEarlyError
            copy = transfer.write(device, storage, record.ready, lambda: request.cancelled, kind=record.origin.kind)
        except EndedEarlyError:
            event = residency.WriteCancelled()
        except SpillWriteError as known:
            event, fault = residency.WriteFailed(), known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            event, fault = residency.WriteFailed(), SpillWriteError(f"{device.engine.name}: {unknown!r}")
        del storage  # so that the memory is really freed when a thread that waits for this write wakes up
        while not self._has_written(record, event, copy, fault, may_change=may_change):
            pass

    def _has_written(
        self,
        record: SpillRecord,
        event: residency.Event,
        copy: Copy | None,
        fault: SpillWriteError | None,
        *,
        may_change: bool,
    ) -> bool:
        """Report how a write ended. Returns False if the memory must be compared with the copy once more.

        Memory with other holders can change at any moment during the write, in ways that no version counter shows.
        """
        device, storage, looked_at = record.disk.device, record.storage, record.disk.compared
        assert device is not None and storage is not None
        if copy is not None and may_change and not transfer.is_same(device, copy, storage, record.ready):
            event = residency.Outdated()
        del storage
        with self._lock:
            if may_change and copy is not None and record.disk.compared != looked_at:
                return False
            device.queued_bytes -= record.size_bytes
            record.disk.copy = copy
            if fault is not None:
                self._write_failed(record, fault)
            self.apply(record, event)
            self._lock.tell()
            return True

    def compare(self, record: SpillRecord, storage: torch.UntypedStorage) -> None:
        """Discard the copy of a storage that was saved again if the memory has other bytes. The lock must not be held.

        A storage that is being written now is compared at the end of that write.
        """
        with self._lock:
            record.ready = transfer.ready_event(storage)
            record.disk.compared += 1
            device, copy = record.disk.device, record.disk.copy
        if device is None or copy is None or transfer.is_same(device, copy, storage, record.ready):
            return
        with self._lock:
            if record.disk.copy is copy:
                self.renew(record, storage)

    def renew(self, record: SpillRecord, storage: torch.UntypedStorage) -> None:
        """Replace an outdated copy by the memory `storage`, as soon as no read of the copy is under way."""
        record.disk.newer = storage
        self._renew(record)

    def _renew(self, record: SpillRecord) -> None:
        if record.disk.newer is None or record.state is State.READING:
            return
        newer, record.disk.newer = record.disk.newer, None
        if record.state in (State.SPILLED, State.RELOADED, State.FAILED):
            record.storage = newer
            self.apply(record, residency.Outdated())

    def _write_failed(self, record: SpillRecord, fault: SpillWriteError) -> None:
        record.disk.fault = fault
        if str(fault) not in self.faults:
            self.faults.append(str(fault))
        if self._write_fault is None or isinstance(self._write_fault, NoSpaceError):
            self._write_fault = fault

    # Reading.

    def _start_read(self, record: SpillRecord, *, urgent: bool) -> None:
        device, copy = record.disk.device, record.disk.copy
        assert device is not None and copy is not None
        try:
            record.storage = self._take(record, copy)
        except Exception:
            self.apply(record, residency.NoMemory())
            if urgent:
                raise
            return  # reading ahead is optional
        record.watched.append(self._account.watch(record.storage))
        urgency = Urgency.DEMAND if urgent else Urgency.PREFETCH
        record.disk.request = device.queue.submit(urgency, partial(self._read, record))

    def _read(self, record: SpillRecord, request: IoRequest) -> None:
        """Read a storage, in a device's thread. The record's state keeps its memory alive until this has reported."""
        device, copy, storage = record.disk.device, record.disk.copy, record.storage
        assert device is not None and copy is not None and storage is not None
        event: residency.Event = residency.ReadDone()
        fault: OffloadError | None = None
        try:
            if request.cancelled:
                raise EndedEarlyError
            transfer.read(device, copy, storage, lambda: request.cancelled)
        except EndedEarlyError:
            event = residency.ReadCancelled()
        except SpillReadError as known:
            event, fault = residency.ReadFailed(), known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            event, fault = residency.ReadFailed(), SpillReadError(f"{device.engine.name}: {unknown!r}")
        del storage
        with self._lock:
            record.disk.fault = fault
            if fault is not None:
                self.faults.append(str(fault))
            self.apply(record, event)
            self._renew(record)
            self._lock.tell()


def again(fault: OffloadError) -> OffloadError:
    """Return a new fault of the same class and arguments, to raise instead of one that is kept."""
    # The traceback of a raised fault refers to the graph. If a kept fault were raised, the graph would live as long.
    return type(fault)(*fault.args)


def _io_of(record: SpillRecord) -> tuple[Device, IoRequest]:
    device, request = record.disk.device, record.disk.request
    assert device is not None and request is not None
    return device, request


def done_after(device: Device, size_bytes: int) -> tuple[float, int]:
    """Return the seconds until the device would have written this too, and the bytes that it has written so far."""
    # Among equal devices the less used one is chosen, so that the speed of every device becomes known.
    return (device.queued_bytes + size_bytes) / device.writes.recent_bytes_per_s, device.writes.moved_bytes
