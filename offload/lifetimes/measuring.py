"""Measurement of points: their seconds without waits, their memory besides pieces, and the bytes that they save.

Loading the pieces of a point is work of the same thread, so it counts as the point's seconds. At the end of a point,
`StandingWatch` also records memory by kind, and the waits and I/O since the last point.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from elastrain.offload.drives import residency
from elastrain.offload.drives.device import Device
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces.piece_memory import HeldPiece, MemoryMeter
from elastrain.offload.lifetimes.saved import SavedTensors
from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.step_recording import HELD, Standing

GUARD_SHARE = 0.01
"""Share of the limit that stays free under any plan, since the kernel's counts are off by some dozens of pages."""


@dataclass(frozen=True, kw_only=True)
class PointFigures:
    """Measurements of one point. Memory is None if it was not measured.

    `extra_bytes` is the memory besides pieces and saved tensors; `unknown_bytes` is the part of it that was there when
    the point began. `over_bytes` is how far the total went into the guard that stays free. `needed_bytes` is the part
    of the saved bytes from which the block can be computed again, or None if it cannot. `seconds` is None if measuring
    them would have made a device wait.
    """

    seconds: float | None
    saved_bytes: int
    needed_bytes: int | None
    extra_bytes: int | None
    unknown_bytes: int = 0
    over_bytes: int = 0


class KnownPoints:
    """Seconds and memory of each point, as far as they were measured.

    A piece that is being read is counted before its pages exist, so the rest seems smaller than it is. So memory is
    learned before there is a plan, while nothing moves. Under a plan the value only grows if the limit came near.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, int]] = {}  # seconds; most memory besides pieces and saved tensors
        self._own_bytes: dict[Hashable, int] = {}  # the part of it that the point itself took
        self.unknown_bytes = 0  # the most at the start of a point since `begin_step`
        self.came_near = False  # True if memory came near the limit since `begin_step`

    def __contains__(self, point: Hashable) -> bool:
        return point in self._seen

    def learn(self, point: Hashable, figures: PointFigures, expected_bytes: int | None) -> tuple[float, int]:
        """Store measurements of a point, and return its seconds and extra bytes.

        Under a plan, `expected_bytes` is the memory that was expected to suffice.
        """
        self.unknown_bytes = max(self.unknown_bytes, figures.unknown_bytes)
        self.came_near |= figures.over_bytes > 0
        seconds, extra_bytes = self._seen.get(point, (0.0, 0))
        seconds = seconds if figures.seconds is None else figures.seconds
        if expected_bytes is not None:
            extra_bytes = max(extra_bytes, expected_bytes + figures.over_bytes if figures.over_bytes else 0)
        elif figures.extra_bytes is not None:
            extra_bytes = figures.extra_bytes
            self._own_bytes[point] = max(0, extra_bytes - figures.unknown_bytes)
        self._seen[point] = seconds, extra_bytes
        return seconds, extra_bytes

    def begin_step(self) -> None:
        """Start a new step with `unknown_bytes` and `came_near` reset."""
        self.unknown_bytes, self.came_near = 0, False

    def extra_bytes(self, point: Hashable, unknown_bytes: int) -> int:
        """Return the expected bytes besides pieces and saved tensors, given that `unknown_bytes` are unknown now."""
        return max(self._seen.get(point, (0.0, 0))[1], unknown_bytes + self._own_bytes.get(point, 0))


class PointMeter:
    """A meter that begins and ends with each point. Seconds do not include waits of the piece store.

    `base_bytes` is the memory that the process held before there were pieces. It is left out of all counts.
    """

    def __init__(self, custody: PieceStore, meter: MemoryMeter, base_bytes: int) -> None:
        self.is_cheap = not meter.runs_ahead  # True if memory can be measured at each point of each step
        self.guard_bytes = int(GUARD_SHARE * custody.account.limit_bytes)
        self.saved_bytes = self.times_again = 0
        self.needed_bytes: int | None = None
        self._custody = custody
        self._meter = meter
        self._base_bytes = base_bytes
        self._again_s = 0.0
        # The state when the thread was free for the next point: its clock, the seconds waited until then, and its id.
        self._freed = (0.0, 0.0, 0)
        self._since: tuple[float, float, int] | None = None  # the same for the running point
        self._held_bytes: tuple[int, int] | None = None  # accounted and unknown bytes when the point began

    def comes(self) -> None:
        """Start to count the thread's time for the next point, since loading its pieces takes time, too."""
        if not self._meter.runs_ahead:
            self._freed = self._now()

    def begin(self, *, with_memory: bool, is_short: bool = False) -> None:
        """Start to measure a point whose pieces are loaded. If `is_short`, do not wait for the device first."""
        self.saved_bytes, self._held_bytes, self._since = 0, None, None
        self.needed_bytes, self._again_s = None, 0.0
        if with_memory:
            # The peak above the accounted bytes is what computing takes, including memory that no part here knows:
            # small tensors, unused heap memory, buffers of libraries, Python's own objects.
            self._meter.forget_peak()
            self._held_bytes = self._custody.accounted_bytes(), self.unknown_bytes()
        if self._meter.runs_ahead and not with_memory:
            if not is_short:
                self._meter.keep_pace()
            return
        self._since = self._now() if self._meter.runs_ahead else self._freed

    def _now(self) -> tuple[float, float, int]:
        return self._meter.clock(), self._custody.waited_s, threading.get_ident()

    def unknown_bytes(self) -> int:
        """Return the bytes that the process holds and no account knows, or 0 on a device, which frees memory late."""
        return self.is_cheap * max(0, self._meter.own_bytes()[0] - self._base_bytes - self._custody.accounted_bytes())

    def computed_again(self, seconds: float) -> None:
        """Note a recomputation of dropped values. Its seconds and memory do not count for the point."""
        self.times_again += 1
        self._again_s += seconds
        if self._held_bytes is not None:
            self._held_bytes = max(self._held_bytes[0], self._custody.accounted_bytes()), self._held_bytes[1]

    def end(self) -> PointFigures:
        """Return what was measured since the point began."""
        found = PointFigures(
            seconds=self._seconds(), saved_bytes=self.saved_bytes, needed_bytes=self.needed_bytes, extra_bytes=None
        )
        self.comes()
        if self._held_bytes is None:
            return found
        most_bytes = self._meter.own_bytes()[1] - self._base_bytes
        accounted_bytes, unknown_bytes = self._held_bytes
        return replace(
            found,
            extra_bytes=max(0, most_bytes - max(accounted_bytes, self._custody.accounted_bytes())),
            unknown_bytes=unknown_bytes,
            over_bytes=max(0, most_bytes + self.guard_bytes - self._custody.account.limit_bytes),
        )

    def _seconds(self) -> float | None:
        if self._since is None or self._since[2] != threading.get_ident():
            return None  # the server of page faults may have begun this point, by the update of a block
        since_s, waited_s, _ = self._since
        apart_s = self._custody.waited_s - waited_s + self._again_s
        return max(0.0, self._meter.clock() - since_s - apart_s)


class StandingWatch:
    """A recorder of memory, waits and I/O, called by the training thread at the end of each point."""

    def __init__(self, custody: PieceStore, saved: SavedTensors, devices: Sequence[Device]) -> None:
        self._custody = custody
        self._saved = saved
        self._devices = devices
        self._waited_s = 0.0
        self._moved = [(0, 0)] * len(devices)

    def take(self, pieces: Iterable[HeldPiece], extra_bytes: int | None) -> Standing | None:
        """Return the measurements, or None if memory was not measured at the point (`extra_bytes` is None)."""
        waited_s, moved = self._custody.waited_s, [(d.writes.moved_bytes, d.reads.moved_bytes) for d in self._devices]
        waited_before_s, moved_before = self._waited_s, self._moved
        self._waited_s, self._moved = waited_s, moved
        if extra_bytes is None:
            return None
        held = dict.fromkeys(HELD, 0)
        for piece in pieces:
            held[piece.kind] += piece.size_bytes * (piece.state in residency.MEMORY)
        held[Kind.ACTIVATION], held[Kind.TEMPORARY] = self._saved.live_bytes(), extra_bytes
        return Standing(
            held_bytes=tuple(held.values()),
            waited_s=waited_s - waited_before_s,
            moved_bytes=tuple(
                (written - written_before, read - read_before)
                for (written, read), (written_before, read_before) in zip(moved, moved_before, strict=True)
            ),
        )
