"""What the manager knows of each saved storage: plain holders. The manager's lock guards all but `Origin`.

Passes: one forward and its backward each, with the storages that it saved and what was measured of it.

The manager's lock guards all of it. No I/O, and no decision but when a pass is over.
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
    """What was saved: never changes."""

    __slots__ = ("device", "dtype", "memory", "module", "pinned", "version")

    def __init__(self, storage: torch.UntypedStorage, *, version: int, dtype: str, module: str, pinned: bool) -> None:
        self.device = storage.device
        # The forward's own memory may live on with somebody else: then nothing has to be read.
        self.memory = weakref.ref(storage)
        self.version = version
        self.dtype = dtype
        self.module = module
        self.pinned = pinned

    @property
    def kind(self) -> str:
        """What compresses alike: the dtype and the type of module, which the trail gives as "name (Type)"."""
        return f"{self.dtype} {self.module.rpartition('(')[2].rstrip(')')}"


class DiskSide:
    """A storage's dealings with a device: the request under way, the copy that is there, what went wrong."""

    __slots__ = ("compared", "copy", "device", "fault", "newer", "request", "was_written")

    def __init__(self) -> None:
        self.device: Device | None = None
        self.request: IoRequest | None = None
        self.copy: Copy | None = None
        self.fault: OffloadError | None = None
        self.was_written = False
        # How often the memory was to be compared with the copy: a write that ends looks whether that has changed.
        self.compared = 0
        # The memory that counts instead of an outdated copy, as long as that copy is still being read.
        self.newer: torch.UntypedStorage | None = None


class Timing:
    """When things happened to a storage, in seconds since its pass began, and how it came back."""

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
        # Graph nodes that may still ask for it.
        self.handles = set[Watched]()
        # Operators that may still fill it: no copy of it would be good.
        self.held = 0
        self.wants_to_leave = False
        # When backward will ask for it, as far as is known; the highest turn comes first.
        self.turn = -1

    def lifetime(self) -> Lifetime:
        """What happened to it, as a value."""
        timing = self.timing
        return Lifetime(
            index=timing.index,
            size_bytes=self.size_bytes,
            dtype=self.origin.dtype,
            module=self.origin.module,
            saved_s=timing.saved_s,
            needed_s=timing.needed_s,
            released_s=timing.released_s,
            path=timing.path,
            waited_s=timing.waited_s,
            stalled_s=timing.stalled_s,
        )


_PATHS = {
    State.RESIDENT: Path.KEPT,
    State.PINNED: Path.KEPT,
    State.WRITING: Path.FORWARDED,
    State.FORWARDED: Path.FORWARDED,
    State.RELOADED: Path.READ_AHEAD,
}
"""How a storage came back, by the state in which backward first asked for it; in all others backward waited."""


class PassMeter:
    """What is counted of one pass."""

    def __init__(self) -> None:
        self.peak_bytes = self.largest_bytes = self.saved_bytes = 0
        self.save_stall_s = self.need_stall_s = 0.0
        self.timeline: list[tuple[float, int]] = []


class Totals:
    """What is counted over all passes."""

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
        # Storages that a graph can still ask for, and those of them that backward has not asked for yet.
        self.open = self.unneeded = 0
        # The forward is under way: what is saved belongs to this pass.
        self.collecting = True
        self.in_backward = False
        # Indices of records by their turn, from when backward begins.
        self._turns: Sequence[int] = ()
        # No turn above it is on disk only.
        self.ahead = -1

    def begin_backward(self, turns: Sequence[int]) -> None:
        """Note that storages are needed from now on, probably those with the highest turn first."""
        self.in_backward, self.collecting = True, False
        self._turns, self.ahead = turns, len(turns) - 1
        for turn, index in enumerate(turns):
            self.records[index].turn = turn

    def in_turn(self, turn: int) -> SpillRecord:
        """The storage that backward is to ask for then."""
        return self.records[self._turns[turn]]

    def profile(self, total_s: float) -> PassProfile:
        """The finished pass as a value."""
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
    """All passes that are not over, and whose each record is. `plan` is told of each finished pass."""

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
        """Since this was made."""
        return self._clock() - self._began_s

    def of(self, record: SpillRecord) -> Pass:
        """The pass that has saved it."""
        return self._of[record]

    def records(self) -> list[SpillRecord]:
        """All storages of all passes, the first saved first."""
        return [record for each in self._passes for record in each.records]

    def saved_in(self, storage: torch.UntypedStorage) -> list[SpillRecord]:
        """Return the records of this memory."""
        return [each for each in self._of if each.origin.memory() is storage]

    def any_in(self, states: frozenset[State]) -> bool:
        """Whether any storage is in one of these states."""
        return any(each.state in states for each in self._of)

    def begin(self) -> Pass:
        """A new forward begins."""
        for each in self._passes:
            each.collecting = False
        opened = Pass(self.totals.passes, self._clock())
        self.totals.passes += 1
        self._passes = [each for each in self._passes if each.open] + [opened]
        return opened

    def current(self) -> Pass:
        """The pass whose forward is under way; a new one if there is none (what is saved outside of any forward)."""
        last = self._passes[-1] if self._passes else None
        return last if last is not None and last.collecting else self.begin()

    def end_forward(self) -> list[Pass]:
        """Close the passes that were collecting; returns those of them that have saved something."""
        ended = [each for each in self._passes if each.collecting and each.records]
        for each in list(self._passes):
            each.collecting = False
            self.finish_if_over(each)
        return ended

    def finish_if_over(self, ended: Pass) -> None:
        """Tell the plan of a pass of which nothing can be asked for any more."""
        if ended.open or ended.collecting or ended not in self._passes:
            return
        self._passes.remove(ended)
        for device in self._devices:
            device.writes.mark()
            device.reads.mark()
        rate_bytes_per_s = sum(device.rate_bytes_per_s() for device in self._devices)
        self.plan.pass_ended(ended.profile(self._clock() - ended.began_s), rate_bytes_per_s)

    # A storage comes, is needed, and goes.

    def enter(self, record: SpillRecord, current: Pass) -> None:
        """Count a storage that was just saved."""
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
        """Count the time since `began_s`, for which backward has waited."""
        now_s, timing = self._clock(), record.timing
        timing.waited_s += now_s - began_s
        current.measured.need_stall_s += now_s - began_s
        self.totals.need_stall_s += now_s - began_s
        if timing.needed_s is None:
            timing.needed_s = now_s - current.began_s
            current.unneeded -= 1

    def came_back(self, record: SpillRecord, first: State) -> None:
        """Note how it came back; `first` is its state when backward asked."""
        if record.timing.path is not Path.UNUSED:
            return
        if first is State.WRITING:
            self.totals.forwarded_bytes += record.size_bytes
        record.timing.path = _PATHS.get(first, Path.WAITED)

    def release(self, record: SpillRecord) -> Pass:
        """Count the end of its last graph node. The caller lets the storage go, then calls `finish_if_over`."""
        current, timing = self._of[record], record.timing
        timing.released_s = self._clock() - current.began_s
        current.open -= 1
        if timing.needed_s is None:
            current.unneeded -= 1
        return current

    def drop(self, record: SpillRecord) -> None:
        """Forget a storage that is gone for good."""
        del self._of[record]

    def live(self, live_bytes: int) -> None:
        """Count how much is in memory now."""
        now_s = self._clock()
        self.totals.peak_bytes = max(self.totals.peak_bytes, live_bytes)
        for each in self._passes:
            each.measured.peak_bytes = max(each.measured.peak_bytes, live_bytes)
            each.measured.timeline.append((now_s - each.began_s, live_bytes))
