"""Records of each saved storage (`SpillRecord`), and of each pass (`Pass`): one forward and its backward.

A pass has the storages that its forward saved and what was measured. The only decision made here is when a pass is
over. No I/O. The manager's lock guards everything but `Origin`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from elastrain.offload.activations.deferred import Watched
from elastrain.offload.activations.spill_policy import SpillPlan
from elastrain.offload.drives.device import Copy, Device
from elastrain.offload.drives.request_queue import IoRequest
from elastrain.offload.drives.residency import State
from elastrain.offload.drives.transfer import ready_event
from elastrain.offload.errors import OffloadError
from elastrain.offload.planning.profile import Lifetime, PassProfile, Path


class Origin:
    """Description of a storage at the time when it was saved. Never changes."""

    __slots__ = ("device", "dtype", "memory", "module", "pinned", "version")

    def __init__(self, storage: torch.UntypedStorage, *, version: int, dtype: str, module: str, pinned: bool) -> None:
        self.device = storage.device
        # The program may keep the forward's own memory alive. Then nothing has to be read.
        self.memory = weakref.ref(storage)
        self.version = version
        self.dtype = dtype
        self.module = module
        self.pinned = pinned

    @property
    def kind(self) -> str:
        """Class of storages that compress alike: dtype and type of module. `module` has the form "name (Type)"."""
        return f"{self.dtype} {self.module.rpartition('(')[2].rstrip(')')}"


class DiskSide:
    """State of a storage on its device: the current request, the copy, and the fault if one occurred."""

    __slots__ = ("compared", "copy", "device", "fault", "newer", "request", "was_written")

    def __init__(self) -> None:
        self.device: Device | None = None
        self.request: IoRequest | None = None
        self.copy: Copy | None = None
        self.fault: OffloadError | None = None
        self.was_written = False
        # Number of comparisons of memory and copy so far. A write checks at its end if one came in between.
        self.compared = 0
        # The memory that will replace an outdated copy, while that copy is still being read.
        self.newer: torch.UntypedStorage | None = None


class Timing:
    """Times of a storage's events, in seconds since its pass began, and the path by which it came back.

    The names are those of `Lifetime`.
    """

    __slots__ = ("index", "needed_s", "path", "released_s", "saved_s", "stalled_s", "waited_s")

    def __init__(self) -> None:
        self.index = -1
        self.path = Path.UNUSED
        self.saved_s = self.stalled_s = self.released_s = self.waited_s = 0.0
        self.needed_s: float | None = None


class SpillRecord:
    """One saved storage of one pass."""

    __slots__ = (
        "__weakref__",
        "disk",
        "handles",
        "held",
        "origin",
        "ready",
        "size_bytes",
        "state",
        "storage",
        "timing",
        "turn",
        "wants_to_leave",
        "watched",
    )

    def __init__(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        self.size_bytes = storage.nbytes()
        self.origin = origin
        self.state = State.PINNED if origin.pinned else State.RESIDENT
        self.storage: torch.UntypedStorage | None = storage
        self.ready = ready_event(storage)
        self.disk = DiskSide()
        self.timing = Timing()
        self.watched: list[Watched] = []
        # Graph nodes that may still need it.
        self.handles = set[Watched]()
        # Number of operators that may still fill it. A copy made now could be outdated.
        self.held = 0
        self.wants_to_leave = False
        # Expected position in backward, which needs the highest turn first. -1 before backward begins.
        self.turn = -1

    def lifetime(self) -> Lifetime:
        """Return the storage's history as a value."""
        times = {name: getattr(self.timing, name) for name in Timing.__slots__}
        return Lifetime(size_bytes=self.size_bytes, dtype=self.origin.dtype, module=self.origin.module, **times)


_PATHS = {
    State.RESIDENT: Path.KEPT,
    State.PINNED: Path.KEPT,
    State.WRITING: Path.FORWARDED,
    State.FORWARDED: Path.FORWARDED,
    State.RELOADED: Path.READ_AHEAD,
}
"""Path by which a storage came back, by its state when backward first needed it. In other states backward waited."""


class PassMeter:
    """Measurements of one pass."""

    def __init__(self) -> None:
        self.peak_bytes = self.largest_bytes = self.saved_bytes = 0
        self.save_stall_s = self.need_stall_s = 0.0
        self.timeline: list[tuple[float, int]] = []


class Totals:
    """Sums over all passes."""

    def __init__(self) -> None:
        self.passes = self.saved_bytes = self.shared_bytes = 0
        self.forwarded_bytes = self.evicted_bytes = self.peak_bytes = 0
        self.save_stall_s = self.need_stall_s = 0.0


class Pass:
    """The storages of one forward, in the order of saving."""

    def __init__(self, number: int, began_s: float) -> None:
        self.number = number
        self.began_s = began_s
        self.records: list[SpillRecord] = []
        self.measured = PassMeter()
        # Number of storages that a graph may still need, and of those that backward has not needed yet.
        self.open = self.unneeded = 0
        # True while the forward runs: storages saved now belong to this pass.
        self.collecting = True
        self.in_backward = False
        # Indices of records by their turn; set when backward begins.
        self._turns: Sequence[int] = ()
        # No storage with a higher turn than this is on disk only.
        self.ahead = -1

    def begin_backward(self, turns: Sequence[int]) -> None:
        """Start the backward. `turns` are indices of records; the last one is expected to be needed first."""
        self.in_backward, self.collecting = True, False
        self._turns, self.ahead = turns, len(turns) - 1
        for turn, index in enumerate(turns):
            self.records[index].turn = turn

    def in_turn(self, turn: int) -> SpillRecord:
        """Return the storage that has this turn in backward."""
        return self.records[self._turns[turn]]

    def profile(self, total_s: float) -> PassProfile:
        """Return the measurements of the finished pass as a value."""
        measured = self.measured
        return PassProfile(
            number=self.number,
            forward_s=max((each.timing.saved_s for each in self.records), default=0.0),
            total_s=total_s,
            saved_bytes=measured.saved_bytes,
            spilled_bytes=sum(each.size_bytes for each in self.records if each.disk.was_written),
            peak_bytes=measured.peak_bytes,
            save_stall_s=measured.save_stall_s,
            need_stall_s=measured.need_stall_s,
            lifetimes=tuple(each.lifetime() for each in self.records),
            timeline=tuple(measured.timeline),
        )


class Passes:
    """All passes that are not over, and the pass of each record. `plan` is notified of each finished pass."""

    def __init__(self, devices: Sequence[Device], plan: SpillPlan, clock: Callable[[], float]) -> None:
        self.plan = plan
        self.totals = Totals()
        self._devices = devices
        self._clock = clock
        self._began_s = clock()
        self._passes: list[Pass] = []
        self._of: dict[SpillRecord, Pass] = {}

    def __iter__(self) -> Iterator[Pass]:
        return iter(self._passes)

    def __contains__(self, record: object) -> bool:
        return record in self._of

    def elapsed_s(self) -> float:
        """Return the seconds since this object was created."""
        return self._clock() - self._began_s

    def of(self, record: SpillRecord) -> Pass:
        """Return the pass that saved the record's storage."""
        return self._of[record]

    def records(self) -> list[SpillRecord]:
        """Return all records of all passes, in the order of saving."""
        return [record for each in self._passes for record in each.records]

    def saved_in(self, storage: torch.UntypedStorage) -> list[SpillRecord]:
        """Return the records of this storage."""
        return [each for each in self._of if each.origin.memory() is storage]

    def any_in(self, states: frozenset[State]) -> bool:
        """Return True if any record is in one of these states."""
        return any(each.state in states for each in self._of)

    def begin(self) -> Pass:
        """Begin a new pass and return it."""
        for each in self._passes:
            each.collecting = False
        opened = Pass(self.totals.passes, self._clock())
        self.totals.passes += 1
        self._passes = [each for each in self._passes if each.open] + [opened]
        return opened

    def current(self) -> Pass:
        """Return the pass whose forward is running. A new pass begins if a storage is saved outside of any forward."""
        last = self._passes[-1] if self._passes else None
        return last if last is not None and last.collecting else self.begin()

    def end_forward(self) -> list[Pass]:
        """End the forward of all passes. Returns those whose forward had been running and saved something."""
        ended = [each for each in self._passes if each.collecting and each.records]
        for each in list(self._passes):
            each.collecting = False
            self.finish_if_over(each)
        return ended

    def finish_if_over(self, ended: Pass) -> None:
        """Remove a pass if no graph needs its storages any more, and notify the plan of it."""
        if ended.open or ended.collecting or ended not in self._passes:
            return
        self._passes.remove(ended)
        for device in self._devices:
            device.writes.mark()
            device.reads.mark()
        rate_bytes_per_s = sum(device.rate_bytes_per_s() for device in self._devices)
        self.plan.pass_ended(ended.profile(self._clock() - ended.began_s), rate_bytes_per_s)

    # The events of a storage, in order.

    def enter(self, record: SpillRecord, current: Pass) -> None:
        """Add a record that was just saved."""
        timing, measured = record.timing, current.measured
        timing.index = len(current.records)
        timing.stalled_s = measured.save_stall_s
        timing.saved_s = self._clock() - current.began_s - timing.stalled_s
        current.records.append(record)
        current.open += 1
        current.unneeded += 1
        measured.largest_bytes = max(measured.largest_bytes, record.size_bytes)
        measured.saved_bytes += record.size_bytes
        self._of[record] = current
        self.totals.saved_bytes += record.size_bytes

    def needed(self, record: SpillRecord, current: Pass, began_s: float) -> None:
        """Add the time that backward has waited since `began_s`."""
        now_s, timing = self._clock(), record.timing
        timing.waited_s += now_s - began_s
        current.measured.need_stall_s += now_s - began_s
        self.totals.need_stall_s += now_s - began_s
        if timing.needed_s is None:
            timing.needed_s = now_s - current.began_s
            current.unneeded -= 1

    def came_back(self, record: SpillRecord, first: State) -> None:
        """Note the path by which a storage came back. `first` is its state when backward needed it."""
        if record.timing.path is not Path.UNUSED:
            return
        if first is State.WRITING:
            self.totals.forwarded_bytes += record.size_bytes
        record.timing.path = _PATHS.get(first, Path.WAITED)

    def release(self, record: SpillRecord) -> Pass:
        """Note that the last graph node of a record is gone.

        The caller then frees the storage and calls `finish_if_over`.
        """
        current, timing = self._of[record], record.timing
        timing.released_s = self._clock() - current.began_s
        current.open -= 1
        if timing.needed_s is None:
            current.unneeded -= 1
        return current

    def drop(self, record: SpillRecord) -> None:
        """Forget a record whose storage is gone."""
        del self._of[record]

    def live(self, live_bytes: int) -> None:
        """Add a point to the timelines of live bytes, and update the peaks."""
        now_s = self._clock()
        self.totals.peak_bytes = max(self.totals.peak_bytes, live_bytes)
        for each in self._passes:
            each.measured.peak_bytes = max(each.measured.peak_bytes, live_bytes)
            each.measured.timeline.append((now_s - each.began_s, live_bytes))
