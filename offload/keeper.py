"""Keeps saved storages: the shell that performs what the residency table and the policy decide.

One lock guards all records; finalizers leave notes with it (`notes.py`). No I/O is done here: devices do it in their
own threads (`transfer.py`) and report what happened.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from elastrain.offload import policy, residency, transfer
from elastrain.offload.account import Account
from elastrain.offload.arena import Arena
from elastrain.offload.device import Copy, Device, EndedEarlyError, NoSpaceError
from elastrain.offload.errors import LimitTooSmallError, OffloadError, SpillReadError, SpillWriteError
from elastrain.offload.notes import NoteLock
from elastrain.offload.planner import Planner
from elastrain.offload.queue import Request, Urgency
from elastrain.offload.records import Pass, Record, Totals
from elastrain.offload.residency import State
from elastrain.offload.stats import OffloadStats, Path


class Keeper:
    """Owns every saved storage between the moment a forward saves it and the moment no graph can ask for it.

    `plan` says how much to spill, and is told of each finished pass. `deadline_s` bounds every wait for a device.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        limit_bytes: int | None,
        plan: Planner,
        deadline_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.devices = tuple(devices)
        self.limit_bytes = limit_bytes
        self.totals = Totals()
        self.faults: list[str] = []
        self._plan = plan
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = NoteLock(self._read_ahead)
        self._account = Account(self._lock, self._count_live)
        self._arena = Arena(self._lock)
        self._passes: list[Pass] = []
        self._pass_of: dict[Record, Pass] = {}
        self._writing_bytes = 0
        self._smallest_bytes = 0
        self._write_fault: SpillWriteError | None = None
        self._closed = False
        self._demanding = False
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _close_all, self.devices)

    # What hooks call.

    def begin_pass(self) -> None:
        """A new forward begins. Raises what earlier passes left to say: `LimitTooSmallError`, `SpillWriteError`."""
        with self._lock:
            self._refuse_small_limit()
            self._raise_write_fault()
            self._open_pass()

    def end_forward(self, *, quietly: bool) -> None:
        """The forward is over. Raises `SpillWriteError`, unless `quietly`, if a device failed to take something."""
        with self._lock:
            for each in list(self._passes):
                each.collecting = False
                self._finish(each)
            if not quietly:
                self._raise_write_fault()

    def save(self, storage: torch.UntypedStorage, *, version: int, dtype: str, module: str) -> Record:
        """Take a storage. Waits while there is no room for it within the limit."""
        record = Record(storage, version=version, dtype=dtype, module=module)
        with self._lock:
            current = self._current_pass()
            self._enter(record, current)
            record.watched.append(self._account.watch(storage))
            if self._plan.spills(record.index):
                self._apply(record, residency.Spill())
            try:
                self._make_room(record, current)
                self._raise_write_fault()
            except OffloadError:
                self._release(record)  # no graph node will hold it
                raise
        return record

    def share(self, record: Record) -> bool:
        """One more graph node wants a storage that was saved before; False if it is gone already."""
        with self._lock:
            if record.state in (State.DROPPED, State.LEAVING):
                return False
            record.handles += 1
            self.totals.shared_bytes += record.size_bytes
            return True

    def need(self, record: Record) -> torch.UntypedStorage:
        """The storage, in memory. Raises `SpillReadError` (or its subclass) if it does not come back."""
        with self._lock:
            current = self._pass_of[record]
            self._enter_backward(current, record)
            began_s = self._clock()
            memory = self._wait_for_memory(record, began_s)
            self._count_need(record, current, began_s)
            self._prefetch(current)
            if not current.unneeded:
                self._refuse_small_limit()
            return memory

    def release(self, record: Record) -> None:
        """One graph node less. Called by finalizers: never blocks, never raises."""
        if os.getpid() == self._pid:
            self._lock.later(partial(self._release, record))

    def set_limit(self, limit_bytes: int) -> None:
        """Another limit. It holds from the next storage on; what is in memory leaves when that one needs room."""
        with self._lock:
            self.limit_bytes = limit_bytes
            self._plan.set_limit(limit_bytes)
            self._lock.tell()

    def close(self) -> None:
        """End the devices. What is on them only can not be asked for any more."""
        with self._lock:
            self._closed = True
        self._end()

    def stats(self, *, elapsed_s: float) -> OffloadStats:
        """What happened so far."""
        with self._lock:
            totals = self.totals
            return OffloadStats(
                limit_bytes=self.limit_bytes,
                passes=totals.passes,
                elapsed_s=elapsed_s,
                live_bytes=self._account.live_bytes,
                peak_bytes=totals.peak_bytes,
                saved_bytes=totals.saved_bytes,
                shared_bytes=totals.shared_bytes,
                spilled_bytes=totals.spilled_bytes,
                forwarded_bytes=totals.forwarded_bytes,
                evicted_bytes=totals.evicted_bytes,
                save_stall_s=totals.save_stall_s,
                need_stall_s=totals.need_stall_s,
                amount=self._plan.reason,
                faults=tuple(self.faults),
                devices=tuple(device.stats() for device in self.devices),
                last=self._plan.last,
            )

    def _wait(self, until_s: float, error: type[OffloadError], what: str) -> None:
        """Let others work until something changes. Raises `error` when a device gives no sign in time."""
        if self._clock() > until_s:
            raise error(f"{what} did not end within {self._deadline_s} s: look at the drive, or use another")
        self._lock.wait()

    def _read_ahead(self) -> None:
        for each in self._passes:
            if each.in_backward:
                self._prefetch(each)

    def _count_live(self) -> None:
        live_bytes, now_s = self._account.live_bytes, self._clock()
        self.totals.peak_bytes = max(self.totals.peak_bytes, live_bytes)
        for each in self._passes:
            each.peak_bytes = max(each.peak_bytes, live_bytes)
            each.timeline.append((now_s - each.began_s, live_bytes))

    # Passes.

    def _open_pass(self) -> Pass:
        for each in self._passes:
            each.collecting = False
        opened = Pass(self.totals.passes, self._clock())
        self.totals.passes += 1
        self._passes = [each for each in self._passes if each.open] + [opened]
        return opened

    def _current_pass(self) -> Pass:
        last = self._passes[-1] if self._passes else None
        return last if last is not None and last.collecting else self._open_pass()

    def _enter(self, record: Record, current: Pass) -> None:
        record.index = len(current.records)
        record.handles = 1
        record.saved_s = self._clock() - current.began_s - current.save_stall_s
        current.records.append(record)
        current.open += 1
        current.largest_bytes = max(current.largest_bytes, record.size_bytes)
        current.saved_bytes += record.size_bytes
        current.unneeded += 1
        self._pass_of[record] = current
        self.totals.saved_bytes += record.size_bytes

    def _enter_backward(self, current: Pass, record: Record) -> None:
        if not current.in_backward:
            current.in_backward = True
            current.collecting = False
            current.ahead = len(current.records) - 1
        current.cursor = record.index

    def _count_need(self, record: Record, current: Pass, began_s: float) -> None:
        now_s = self._clock()
        record.waited_s += now_s - began_s
        current.need_stall_s += now_s - began_s
        self.totals.need_stall_s += now_s - began_s
        if record.needed_s is None:
            record.needed_s = now_s - current.began_s
            current.unneeded -= 1

    def _finish(self, ended: Pass) -> None:
        if ended.open or ended.collecting or ended not in self._passes:
            return
        self._passes.remove(ended)
        for device in self.devices:
            device.writes.mark()
            device.reads.mark()
        rate_bytes_per_s = sum(device.rate_bytes_per_s() for device in self.devices)
        self._plan.pass_ended(ended.profile(self._clock() - ended.began_s), rate_bytes_per_s)

    # The residency machine.

    def _apply(self, record: Record, event: residency.Event) -> tuple[residency.Command, ...]:
        before = record.state
        record.state, commands = residency.advance(before, event)
        self._writing_bytes += record.size_bytes * ((record.state is State.WRITING) - (before is State.WRITING))
        for command in commands:
            self._perform(record, command)
        if record.state is State.DROPPED and before is not State.DROPPED:
            self._dropped(record)
        return commands

    def _perform(self, record: Record, command: residency.Command) -> None:
        match command:
            case residency.HandBack() | residency.RaiseFault():
                pass  # for who asked
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
                if record.device is not None and record.copy is not None:
                    record.device.free(record.copy.slot)
                record.copy = None

    def _dropped(self, record: Record) -> None:
        for watched in record.watched:
            self._account.forget(watched)
        del self._pass_of[record]

    def _release(self, record: Record) -> None:
        record.handles -= 1
        if record.handles:
            return
        current = self._pass_of[record]
        record.released_s = self._clock() - current.began_s
        current.open -= 1
        if record.needed_s is None:
            current.unneeded -= 1
        self._apply(record, residency.Release())
        self._finish(current)

    # Writing.

    def _start_write(self, record: Record) -> None:
        device = min(self.devices, key=lambda d: (d.queued_bytes + record.size_bytes) / d.writes.recent_bytes_per_s)
        device.queued_bytes += record.size_bytes
        record.device, record.spilled = device, True
        self.totals.spilled_bytes += record.size_bytes
        record.request = device.queue.submit(Urgency.WRITE, partial(self._write, record))

    def _write(self, record: Record, request: Request) -> None:
        """In a device's thread: the record is in a state that holds its memory until this has reported."""
        device, storage = record.device, record.storage
        assert device is not None and storage is not None
        event: residency.Event = residency.WriteDone()
        copy, fault = None, None
        try:
            if request.cancelled:
                raise EndedEarlyError
            copy = transfer.write(device, storage, record.ready, lambda: request.cancelled, kind=record.kind)
        except EndedEarlyError:
            event = residency.WriteCancelled()
        except SpillWriteError as known:
            event, fault = residency.WriteFailed(), known
        except Exception as unknown:  # noqa: BLE001 - edge of a thread: an unknown fault must reach the trainer
            event, fault = residency.WriteFailed(), SpillWriteError(f"{device.engine.name}: {unknown!r}")
        del storage
        with self._lock:
            device.queued_bytes -= record.size_bytes
            record.copy = copy
            if fault is not None:
                self._write_failed(record, fault)
            self._apply(record, event)
            self._lock.tell()

    def _write_failed(self, record: Record, fault: SpillWriteError) -> None:
        record.fault = fault
        if str(fault) not in self.faults:
            self.faults.append(str(fault))
        if self._write_fault is None or isinstance(self._write_fault, NoSpaceError):
            self._write_fault = fault

    def _raise_write_fault(self) -> None:
        """A full device only matters where there is a limit to keep; any other fault is said at once."""
        fault = self._write_fault
        if fault is not None and not isinstance(fault, NoSpaceError):
            self._write_fault = None
            raise _again(fault)

    def _make_room(self, newest: Record, current: Pass) -> None:
        """Wait until the next storage fits too: it will be in memory before anybody can ask for room for it."""
        if self.limit_bytes is None or self._account.live_bytes <= self._wanted_bytes(current):
            return
        began_s = self._clock()
        while self._account.live_bytes > (wanted_bytes := self._wanted_bytes(current)):
            self._spill_more(newest, wanted_bytes)
            if not self._being_written_but(newest):
                break
            self._wait(began_s + self._deadline_s, SpillWriteError, "writing activations")
        stalled_s = self._clock() - began_s
        current.save_stall_s += stalled_s
        self.totals.save_stall_s += stalled_s
        if self._account.live_bytes > self.limit_bytes:
            if self._write_fault is not None:
                raise _again(self._write_fault)
            self._smallest_bytes = max(self._smallest_bytes, self._account.live_bytes)

    def _wanted_bytes(self, current: Pass) -> int:
        """Room for one more storage within the limit that holds now: it may change while somebody waits."""
        assert self.limit_bytes is not None
        return max(0, self.limit_bytes - current.largest_bytes)

    def _spill_more(self, newest: Record, wanted_bytes: int) -> None:
        for record in [record for each in self._passes for record in each.records]:
            if self._account.live_bytes - self._writing_bytes <= wanted_bytes:
                return
            if record is not newest and record.fault is None:
                self._apply(record, residency.Spill())
                self._lock.act()

    def _being_written_but(self, newest: Record) -> bool:
        own_bytes = newest.size_bytes if newest.state is State.WRITING else 0
        return self._writing_bytes > own_bytes

    # Reading.

    def _start_read(self, record: Record, *, urgent: bool) -> None:
        device, copy = record.device, record.copy
        assert device is not None and copy is not None
        record.storage = self._take(copy, record.place, self._pass_of[record])
        record.watched.append(self._account.watch(record.storage))
        urgency = Urgency.DEMAND if urgent else Urgency.PREFETCH
        record.request = device.queue.submit(urgency, partial(self._read, record))

    def _take(self, copy: Copy, place: torch.device, current: Pass) -> torch.UntypedStorage:
        if place.type != "cpu":
            return transfer.take(size_bytes=copy.size_bytes, device=place)
        capacity_bytes = min(self.limit_bytes or current.peak_bytes, current.saved_bytes)
        return self._arena.lease(
            size_bytes=copy.size_bytes, shift_bytes=copy.shift_bytes, capacity_bytes=capacity_bytes
        ).storage

    def _read(self, record: Record, request: Request) -> None:
        """In a device's thread: the record is in a state that holds its memory until this has reported."""
        device, copy, storage = record.device, record.copy, record.storage
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
            record.fault = fault
            if fault is not None:
                self.faults.append(str(fault))
            self._apply(record, event)
            self._lock.tell()

    def _wait_for_memory(self, record: Record, began_s: float) -> torch.UntypedStorage:
        first_state = record.state
        while True:
            if self._closed and record.storage is None:
                raise SpillReadError("the offload was closed before backward: close it after the last backward")
            self._look_for_original(record)
            self._make_room_for(record, began_s + self._deadline_s)
            commands = self._apply(record, residency.Need())
            if residency.HAND_BACK in commands:
                assert record.storage is not None
                self._note_path(record, first_state)
                transfer.hand_over(record.storage)
                return record.storage
            if residency.RAISE_FAULT in commands:
                assert record.fault is not None
                raise _again(record.fault)
            self._wait(began_s + self._deadline_s, SpillReadError, "reading activations")

    def _look_for_original(self, record: Record) -> None:
        if record.state is State.SPILLED and (original := record.original()) is not None:
            record.storage = original
            self._apply(record, residency.Found())

    def _note_path(self, record: Record, first: State) -> None:
        if record.path is not Path.UNUSED:
            return
        if first is State.WRITING:
            self.totals.forwarded_bytes += record.size_bytes
        record.path = _PATHS.get(first, Path.WAITED)

    def _room_bytes(self, current: Pass) -> int:
        """For what is needed now."""
        if self.limit_bytes is not None:
            return self.limit_bytes - self._account.live_bytes
        return self._room_ahead_bytes(current)

    def _room_ahead_bytes(self, current: Pass) -> int:
        """For what will be needed."""
        allowed_bytes = policy.reading_ahead_bytes(
            limit_bytes=self.limit_bytes, peak_bytes=current.peak_bytes, largest_bytes=current.largest_bytes
        )
        return allowed_bytes - self._account.live_bytes

    def _prefetch(self, current: Pass) -> None:
        if self._demanding or current.ahead < 0:
            return
        room_bytes = self._room_ahead_bytes(current)
        if room_bytes <= 0:
            return
        for candidate in policy.choose_prefetch(self._ahead(current), room_bytes=room_bytes):
            self._apply(current.records[candidate.index], residency.Prefetch())

    def _ahead(self, current: Pass) -> Iterator[policy.Candidate]:
        """What is on disk only, in the order in which backward will ask for it."""
        passing = True
        for index in range(current.ahead, -1, -1):
            record = current.records[index]
            if record.state is State.SPILLED and record.needed_s is None:
                passing = False
                yield policy.Candidate(index=index, size_bytes=record.size_bytes)
            elif passing and record.state not in (State.WRITING, State.SPILLED):
                current.ahead = index - 1
            else:
                passing = False

    def _make_room_for(self, record: Record, until_s: float) -> None:
        """Give up what backward needs later, and wait for what is on its way out, before taking memory for this."""
        current = self._pass_of[record]
        self._demanding = True
        try:
            while record.state is State.SPILLED and record.size_bytes > self._room_bytes(current):
                if self._evict_for(record, current):
                    continue  # memory that somebody else holds too is not free now: look again
                if self.limit_bytes is None:
                    return
                if not self._anything_in_flight():
                    self._smallest_bytes = max(self._smallest_bytes, self._account.live_bytes + record.size_bytes)
                    return
                self._wait(until_s, SpillReadError, "making room for a tensor that backward needs")
        finally:
            self._demanding = False

    def _evict_for(self, record: Record, current: Pass) -> bool:
        """First what is on disk already, at no cost; then, under a limit, what has to be written."""
        for state in (State.RELOADED, State.RESIDENT):
            wanted_bytes = record.size_bytes - self._room_bytes(current) - self._writing_bytes
            may_leave = state is State.RELOADED or self.limit_bytes is not None
            if wanted_bytes > 0 and may_leave and self._give_up(state, record, current, wanted_bytes):
                return True
        return False

    def _give_up(self, state: State, record: Record, current: Pass, wanted_bytes: int) -> bool:
        candidates = [
            policy.Candidate(index=each.index, size_bytes=each.size_bytes)
            for each in current.records
            if each.state is state and (state is State.RELOADED or each.fault is None)
        ]
        chosen = policy.choose_evictions(candidates, cursor=record.index, wanted_bytes=wanted_bytes)
        for choice in chosen:
            self.totals.evicted_bytes += choice.size_bytes
            self._apply(current.records[choice.index], residency.Spill())
            current.ahead = max(current.ahead, choice.index if choice.index < record.index else -1)
        self._lock.act()
        return bool(chosen)

    def _anything_in_flight(self) -> bool:
        return any(each.state in residency.IN_FLIGHT for each in self._pass_of)

    def _refuse_small_limit(self) -> None:
        if self.limit_bytes is not None and self._smallest_bytes > self.limit_bytes:
            raise LimitTooSmallError(self.limit_bytes, self._smallest_bytes)


_PATHS = {
    State.RESIDENT: Path.KEPT,
    State.WRITING: Path.FORWARDED,
    State.FORWARDED: Path.FORWARDED,
    State.RELOADED: Path.READ_AHEAD,
}


def _again(fault: OffloadError) -> OffloadError:
    """A fault that is kept must not be raised itself: its traceback would hold the graph as long as it is kept."""
    return type(fault)(*fault.args)


def _io_of(record: Record) -> tuple[Device, Request]:
    assert record.device is not None and record.request is not None
    return record.device, record.request


def _close_all(devices: Sequence[Device]) -> None:
    for device in devices:
        device.close()
