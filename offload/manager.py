"""Keeps saved storages: passes, waiting, and room within the limit, as the policy decides. `mover.py` moves them.

One lock guards all records; finalizers leave notes with it (`deferred.py`). No I/O is done here.
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
from elastrain.offload.arena import ReadArena
from elastrain.offload.deferred import DeferredLock
from elastrain.offload.device import Copy, Device
from elastrain.offload.errors import LimitTooSmallError, OffloadError, SpillReadError, SpillWriteError
from elastrain.offload.holds import Hold, Holds, Operator
from elastrain.offload.mover import Mover, again
from elastrain.offload.planner import Planner
from elastrain.offload.records import Pass, SpillRecord, Totals
from elastrain.offload.residency import State
from elastrain.offload.stats import OffloadStats, Path


class SpillManager:
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
        self._plan = plan
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = DeferredLock(self._read_ahead)
        self._account = Account(self._lock, self._count_live)
        self._arena = ReadArena(self._lock)
        self._passes: list[Pass] = []
        self._pass_of: dict[SpillRecord, Pass] = {}
        self._mover = Mover(self.devices, self._lock, self._account, take=self._take, dropped=self._dropped)
        self._holds = Holds(self._lock, self._mover)
        self._smallest_bytes = 0
        self._is_given = limit_bytes is not None  # by the user, before anything was saved
        self._foreseen_bytes: int | None = None  # the largest storage of the last forward
        self._closed = False
        self._demanding = False
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _close_all, self.devices)

    # What hooks call.

    def begin_pass(self) -> None:
        """A new forward begins. Raises what earlier passes left to say: `LimitTooSmallError`, `SpillWriteError`."""
        with self._lock:
            self._refuse_small_limit()
            self._mover.raise_write_fault()
            self._open_pass()

    def end_forward(self, *, quietly: bool) -> None:
        """The forward is over. Raises `SpillWriteError`, unless `quietly`, if a device failed to take something."""
        self._holds.settle(None)
        with self._lock:
            for each in list(self._passes):
                if each.collecting and each.records and not quietly:
                    self._foreseen_bytes = each.largest_bytes
                each.collecting = False
                self._finish(each)
            if not quietly:
                self._mover.raise_write_fault()

    def save(
        self,
        storage: torch.UntypedStorage,
        *,
        version: int,
        dtype: str,
        module: str,
        pinned: bool = False,
        operator: Operator | None = None,
    ) -> SpillRecord:
        """Take a storage, which never leaves if `pinned`, and not before the `operator` that saves it has returned.

        Waits while there is no room for it within the limit.
        """
        self._holds.settle(operator)
        record = SpillRecord(storage, version=version, dtype=dtype, module=module, pinned=pinned)
        with self._lock:
            current = self._current_pass()
            self._enter(record, current)
            record.watched.append(self._account.watch(storage))
            passed_bytes = self._passed_bytes(record, current)
            record.wants_to_leave = self._plan.spills(record.index)
            if operator is not None:
                self._holds.add(Hold(record, storage, operator, is_shared=False))
            self._holds.let_leave(record)
            try:
                self._make_room(current)
                self._mover.raise_write_fault()
            except OffloadError:
                self._release(record)  # no graph node will hold it
                raise
            self._smallest_bytes = max(self._smallest_bytes, passed_bytes)
        return record

    def share(self, record: SpillRecord, storage: torch.UntypedStorage, operator: Operator) -> bool:
        """One more graph node wants a storage that was saved before; False if it is gone, or is another manager's.

        Once the `operator` has returned, a copy that was made before is compared with the memory.
        """
        self._holds.settle(operator)
        with self._lock:
            if record not in self._pass_of or record.state is State.LEAVING:
                return False
            record.handles += 1
            self._holds.add(Hold(record, storage, operator, is_shared=True))
            self.totals.shared_bytes += record.size_bytes
            return True

    def need(self, record: SpillRecord) -> torch.UntypedStorage:
        """The storage, in memory. Raises `SpillReadError` (or its subclass) if it does not come back."""
        if record.held:
            self._holds.settle_operators_of(record)
        with self._lock:
            current = self._pass_of[record]
            if not current.in_backward:
                current.begin_backward(self._plan.turns(len(current.records)))
            began_s = self._clock()
            memory = self._wait_for_memory(record, began_s)
            self._count_need(record, current, began_s)
            if not current.unneeded:
                self._refuse_small_limit()
            return memory

    def read_ahead(self, record: SpillRecord) -> None:
        """What backward will need after this storage, as far as there is room."""
        with self._lock:
            self._prefetch(self._pass_of[record])

    def release(self, record: SpillRecord) -> None:
        """One graph node less. Called by finalizers: never blocks, never raises."""
        if os.getpid() == self._pid:
            self._lock.later(partial(self._release, record))

    def set_limit(self, limit_bytes: int) -> None:
        """Another limit. It holds from the next storage on; what is in memory leaves when that one needs room."""
        with self._lock:
            self.limit_bytes, self._is_given = limit_bytes, False
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
                spilled_bytes=self._mover.spilled_bytes,
                forwarded_bytes=totals.forwarded_bytes,
                evicted_bytes=totals.evicted_bytes,
                save_stall_s=totals.save_stall_s,
                need_stall_s=totals.need_stall_s,
                amount=self._plan.reason,
                faults=tuple(self._mover.faults),
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
        self._arena.trim()

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

    def _enter(self, record: SpillRecord, current: Pass) -> None:
        record.index = len(current.records)
        record.handles = 1
        record.stalled_s = current.save_stall_s
        record.saved_s = self._clock() - current.began_s - record.stalled_s
        current.records.append(record)
        current.open += 1
        current.largest_bytes = max(current.largest_bytes, record.size_bytes)
        current.saved_bytes += record.size_bytes
        current.unneeded += 1
        self._pass_of[record] = current
        self.totals.saved_bytes += record.size_bytes

    def _count_need(self, record: SpillRecord, current: Pass, began_s: float) -> None:
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

    def _dropped(self, record: SpillRecord) -> None:
        self._holds.forget(record)
        del self._pass_of[record]

    def _release(self, record: SpillRecord) -> None:
        record.handles -= 1
        if record.handles:
            return
        current = self._pass_of[record]
        record.released_s = self._clock() - current.began_s
        current.open -= 1
        if record.needed_s is None:
            current.unneeded -= 1
        self._mover.apply(record, residency.Release())
        self._finish(current)

    def _take(self, record: SpillRecord, copy: Copy) -> torch.UntypedStorage:
        """Memory for what is read back."""
        place, current = record.place, self._pass_of[record]
        if place.type != "cpu":
            return transfer.take(size_bytes=copy.size_bytes, device=place)
        capacity_bytes = min(self.limit_bytes or current.peak_bytes, current.saved_bytes)
        return self._arena.lease(
            size_bytes=copy.size_bytes, shift_bytes=copy.shift_bytes, capacity_bytes=capacity_bytes
        ).storage

    # Room in forward.

    def _make_room(self, current: Pass) -> None:
        """Wait until the next storage fits too: it will be in memory before anybody can ask for room for it."""
        if self.limit_bytes is None or self._account.live_bytes <= self._wanted_bytes(current):
            return
        began_s = self._clock()
        while self._account.live_bytes > (wanted_bytes := self._wanted_bytes(current)):
            self._spill_more(wanted_bytes)
            if not self._mover.writing_bytes:
                break
            self._wait(began_s + self._deadline_s, SpillWriteError, "writing activations")
        stalled_s = self._clock() - began_s
        current.save_stall_s += stalled_s
        self.totals.save_stall_s += stalled_s
        if self._account.live_bytes > self.limit_bytes:
            self._mover.raise_write_fault(full_too=True)
            self._smallest_bytes = max(self._smallest_bytes, self._account.live_bytes)

    def _wanted_bytes(self, current: Pass) -> int:
        """Room for one more storage within the limit that holds now: it may change while somebody waits.

        In the first forward nobody knows how large that will be: everything leaves.
        """
        assert self.limit_bytes is not None
        foreseen_bytes = self.limit_bytes if self._foreseen_bytes is None else self._foreseen_bytes
        return max(0, self.limit_bytes - max(current.largest_bytes, foreseen_bytes))

    def _passed_bytes(self, record: SpillRecord, current: Pass) -> int:
        """By a storage that was just saved: how much is live if that is more than the limit, and none could leave.

        0 where another limit held a moment ago, this storage was not foreseen, or a drive or a backward is the cause.
        """
        live_bytes, foreseen_bytes = self._account.live_bytes, self._foreseen_bytes
        room_was_made = self._is_given and record.index > 0
        foreseen = foreseen_bytes is None or record.size_bytes <= foreseen_bytes
        disturbed = self._mover.faults or any(each.in_backward for each in self._passes)
        is_passed = self.limit_bytes is not None and live_bytes > self.limit_bytes
        return live_bytes if is_passed and room_was_made and foreseen and not disturbed else 0

    def _spill_more(self, wanted_bytes: int) -> None:
        for record in [record for each in self._passes for record in each.records]:
            if self._account.live_bytes - self._mover.writing_bytes <= wanted_bytes:
                return
            if record.fault is None and not record.held:
                self._mover.apply(record, residency.Spill())
                self._lock.act()

    # Room in backward.

    def _wait_for_memory(self, record: SpillRecord, began_s: float) -> torch.UntypedStorage:
        first_state = record.state
        while True:
            if self._closed and record.storage is None:
                raise SpillReadError("the offload was closed before backward: close it after the last backward")
            self._look_for_original(record)
            self._make_room_for(record, began_s + self._deadline_s)
            commands = self._mover.apply(record, residency.Need())
            if residency.HAND_BACK in commands:
                assert record.storage is not None
                self._note_path(record, first_state)
                transfer.hand_over(record.storage)
                return record.storage
            if residency.RAISE_FAULT in commands:
                assert record.fault is not None
                raise again(record.fault)
            self._wait(began_s + self._deadline_s, SpillReadError, "reading activations")

    def _look_for_original(self, record: SpillRecord) -> None:
        if record.state is State.SPILLED and (original := record.original()) is not None:
            record.storage = original
            self._mover.apply(record, residency.Found())

    def _note_path(self, record: SpillRecord, first: State) -> None:
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
            record = current.in_turn(candidate.turn)
            self._mover.apply(record, residency.Prefetch())
            if record.state is State.SPILLED:
                return  # there is no memory, whatever the limit allows

    def _ahead(self, current: Pass) -> Iterator[policy.Candidate]:
        """What is on disk only, in the order in which backward will ask for it."""
        passing = True
        for turn in range(current.ahead, -1, -1):
            record = current.in_turn(turn)
            if record.state is State.SPILLED and record.needed_s is None:
                passing = False
                yield policy.Candidate(turn=turn, size_bytes=record.size_bytes)
            elif passing and record.state not in (State.WRITING, State.SPILLED):
                current.ahead = turn - 1
            else:
                passing = False

    def _make_room_for(self, record: SpillRecord, until_s: float) -> None:
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

    def _evict_for(self, record: SpillRecord, current: Pass) -> bool:
        """First what is on disk already, at no cost; then, under a limit, what has to be written."""
        for state in (State.RELOADED, State.RESIDENT):
            wanted_bytes = record.size_bytes - self._room_bytes(current) - self._mover.writing_bytes
            may_leave = state is State.RELOADED or self.limit_bytes is not None
            if wanted_bytes > 0 and may_leave and self._give_up(state, record, current, wanted_bytes):
                return True
        return False

    def _give_up(self, state: State, record: SpillRecord, current: Pass, wanted_bytes: int) -> bool:
        candidates = [
            policy.Candidate(turn=each.turn, size_bytes=each.size_bytes)
            for each in current.records
            if each.state is state and (state is State.RELOADED or each.fault is None) and not each.held
        ]
        chosen = policy.choose_evictions(candidates, cursor=record.turn, wanted_bytes=wanted_bytes)
        for choice in chosen:
            self.totals.evicted_bytes += choice.size_bytes
            self._mover.apply(current.in_turn(choice.turn), residency.Spill())
            current.ahead = max(current.ahead, choice.turn if choice.turn < record.turn else -1)
        self._lock.act()
        return bool(chosen)

    def _anything_in_flight(self) -> bool:
        return any(each.state in residency.IN_FLIGHT for each in self._pass_of)

    def _refuse_small_limit(self) -> None:
        if self.limit_bytes is not None and self._smallest_bytes > self.limit_bytes:
            raise LimitTooSmallError(self.limit_bytes, self._smallest_bytes)


_PATHS = {
    State.RESIDENT: Path.KEPT,
    State.PINNED: Path.KEPT,
    State.WRITING: Path.FORWARDED,
    State.FORWARDED: Path.FORWARDED,
    State.RELOADED: Path.READ_AHEAD,
}


def _close_all(devices: Sequence[Device]) -> None:
    for device in devices:
        device.close()
