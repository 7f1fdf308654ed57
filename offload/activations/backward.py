"""Reads during backward: what is needed now, what is read ahead, and which storages are evicted to make room.

All methods run with the manager's lock held; a wait releases it. `spill_policy.py` decides which storages are read
ahead or evicted.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from elastrain.offload.activations import spill_policy
from elastrain.offload.activations.arena import ReadArena
from elastrain.offload.activations.deferred import DeferredLock
from elastrain.offload.activations.mover import Mover, again
from elastrain.offload.activations.pass_records import Pass, Passes, SpillRecord
from elastrain.offload.activations.saved_limit import Account, BoundedWait, SpillLimit
from elastrain.offload.drives import residency, transfer
from elastrain.offload.drives.device import Copy
from elastrain.offload.drives.residency import State
from elastrain.offload.errors import SpillReadError, SpillWriteError


class ReadMemory:
    """Memory for storages that are read back. CPU storages lie in an arena, which reuses its pages."""

    def __init__(self, lock: DeferredLock, limit: SpillLimit, passes: Passes) -> None:
        self._arena = ReadArena(lock)
        self._limit = limit
        self._passes = passes

    def take(self, record: SpillRecord, copy: Copy) -> torch.UntypedStorage:
        """Return memory that the copy fits into. Raises MemoryError, OSError or `torch.OutOfMemoryError`."""
        place, measured = record.origin.device, self._passes.of(record).measured
        if place.type != "cpu":
            return transfer.take(size_bytes=copy.size_bytes, device=place)
        capacity_bytes = min(self._limit.limit_bytes or measured.peak_bytes, measured.saved_bytes)
        return self._arena.lease(
            size_bytes=copy.size_bytes, shift_bytes=copy.shift_bytes, capacity_bytes=capacity_bytes
        ).storage

    @property
    def idle_bytes(self) -> int:
        """Bytes of the arena that are backed by pages and hold no storage."""
        return self._arena.idle_bytes

    def trim(self) -> None:
        """Give pages that the next reads will not need back to the kernel."""
        self._arena.trim(generously=self._passes.plan.reads_ahead)


class BackwardReloader:
    """The part of the manager that brings storages back into memory, within the limit.

    After `close`, none can be read from a device.
    """

    def __init__(
        self, lock: DeferredLock, limit: SpillLimit, passes: Passes, mover: Mover, account: Account, wait: BoundedWait
    ) -> None:
        self._lock, self._limit, self._passes = lock, limit, passes
        self._mover, self._account, self._wait = mover, account, wait
        self._closed = False
        # True while room is made for a storage that is needed now. Reading ahead would take that room away.
        self._demanding = False

    def close(self) -> None:
        """Record that the devices are closed."""
        self._closed = True

    def need(self, record: SpillRecord) -> torch.UntypedStorage:
        """Return the storage, in memory. Waits until it was read.

        Raises SpillReadError (or its subclass) if it is not read in time. Raises LimitTooSmallError with the last
        storage of a pass if the limit was too small for something that backward needed.
        """
        current = self._passes.of(record)
        if not current.in_backward:
            current.begin_backward(self._passes.plan.turns(len(current.records)))
        began_s = self._wait.clock()
        memory = self._bring(record, self._wait.until_s(began_s))
        self._passes.needed(record, current, began_s)
        if not current.unneeded:
            self._limit.check()
        return memory

    def _bring(self, record: SpillRecord, until_s: float) -> torch.UntypedStorage:
        first_state = record.state
        while True:
            if self._closed and record.storage is None:
                raise SpillReadError("the offload was closed before backward: close it after the last backward")
            self._look_for_original(record)
            self._make_room_for(record, until_s)
            commands = self._mover.apply(record, residency.Need())
            if residency.HAND_BACK in commands:
                assert record.storage is not None
                self._passes.came_back(record, first_state)
                return record.storage
            if residency.RAISE_FAULT in commands:
                assert record.disk.fault is not None
                raise again(record.disk.fault)
            self._wait.wait(until_s, SpillReadError, "reading activations")

    def claim(self, record: SpillRecord, storage: torch.UntypedStorage) -> None:
        """Hand out `storage` from now on, whatever its owner writes into it.

        Waits until no device uses the record's memory.
        """
        until_s = self._wait.until_s(self._wait.clock())
        if record.state is State.WRITING:
            self._mover.apply(record, residency.Need())  # cancels the write
        while record.state in residency.IN_FLIGHT:
            self._wait.wait(until_s, SpillWriteError, "writing activations")
        self._mover.renew(record, storage)
        record.held += 1  # never released: no copy of it is written from now on
        for watched in record.watched:
            self._account.forget(watched)

    def _look_for_original(self, record: SpillRecord) -> None:
        if record.state is State.SPILLED and (original := record.origin.memory()) is not None:
            record.storage = original
            self._mover.apply(record, residency.Found())

    def read_ahead(self, current: Pass) -> None:
        """Start reads of what the pass will need next, as far as there is room."""
        if self._demanding or current.ahead < 0 or not self._passes.plan.reads_ahead:
            return
        room_bytes = self._room_ahead_bytes(current)
        if room_bytes <= 0:
            return
        for candidate in spill_policy.choose_prefetch(self._on_disk(current), room_bytes=room_bytes):
            record = current.in_turn(candidate.turn)
            self._look_for_original(record)
            self._mover.apply(record, residency.Prefetch())
            if record.state is State.SPILLED:
                return  # there is no memory, whatever the limit allows

    def read_ahead_everywhere(self) -> None:
        """Call `read_ahead` for every pass in backward, because memory may have become free."""
        for each in self._passes:
            if each.in_backward:
                self.read_ahead(each)

    def _on_disk(self, current: Pass) -> Iterator[spill_policy.Candidate]:
        """Yield the storages that are on disk only, in the order in which backward will need them.

        Also lowers `current.ahead` past turns that need no read.
        """
        passing = True
        for turn in range(current.ahead, -1, -1):
            record = current.in_turn(turn)
            if record.state is State.SPILLED and record.timing.needed_s is None:
                passing = False
                yield spill_policy.Candidate(turn=turn, size_bytes=record.size_bytes)
            elif passing and record.state not in (State.WRITING, State.SPILLED):
                current.ahead = turn - 1
            else:
                passing = False

    def _room_ahead_bytes(self, current: Pass) -> int:
        """Return how many bytes may be read ahead now. Not positive if there is no room."""
        measured = current.measured
        allowed_bytes = spill_policy.reading_ahead_bytes(
            limit_bytes=self._limit.limit_bytes, peak_bytes=measured.peak_bytes, largest_bytes=measured.largest_bytes
        )
        return allowed_bytes - self._account.live_bytes

    # Room for what is needed now.

    def _make_room_for(self, record: SpillRecord, until_s: float) -> None:
        """Evict storages that backward needs later, then wait for writes under way, until this storage fits.

        Without a limit it does not wait. If no transfer is left to wait for, the limit is noted as too small.
        """
        current = self._passes.of(record)
        self._demanding = True
        try:
            while record.state is State.SPILLED and record.size_bytes > self._room_bytes(current):
                if self._evict_for(record, current):
                    continue  # evicted memory may stay in use elsewhere: measure again
                if self._limit.limit_bytes is None:
                    return
                if not self._passes.any_in(residency.IN_FLIGHT):
                    self._limit.at_least(self._account.live_bytes + record.size_bytes)
                    return
                self._wait.wait(until_s, SpillReadError, "making room for a tensor that backward needs")
        finally:
            self._demanding = False

    def _room_bytes(self, current: Pass) -> int:
        if self._limit.limit_bytes is not None:
            return self._limit.limit_bytes - self._account.live_bytes
        return self._room_ahead_bytes(current)

    def _evict_for(self, record: SpillRecord, current: Pass) -> bool:
        """Evict storages that have a copy on disk, which costs nothing. Under a limit, then write out others.

        Returns True if any storage was evicted.
        """
        for state in (State.RELOADED, State.RESIDENT):
            wanted_bytes = record.size_bytes - self._room_bytes(current) - self._mover.writing_bytes
            may_leave = state is State.RELOADED or self._limit.limit_bytes is not None
            if wanted_bytes > 0 and may_leave and self._give_up(state, record, current, wanted_bytes):
                return True
        return False

    def _give_up(self, state: State, record: SpillRecord, current: Pass, wanted_bytes: int) -> bool:
        candidates = [
            spill_policy.Candidate(turn=each.turn, size_bytes=each.size_bytes)
            for each in current.records
            if each.state is state and (state is State.RELOADED or each.disk.fault is None) and not each.held
        ]
        chosen = spill_policy.choose_evictions(candidates, cursor=record.turn, wanted_bytes=wanted_bytes)
        for choice in chosen:
            self._passes.totals.evicted_bytes += choice.size_bytes
            self._mover.apply(current.in_turn(choice.turn), residency.Spill())
            current.ahead = max(current.ahead, choice.turn if choice.turn < record.turn else -1)
        self._lock.act()
        return bool(chosen)
