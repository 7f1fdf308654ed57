"""Measures one point at a time: its seconds without waits, what it takes besides pieces, what it saves.

To have there what a point uses is work of the same thread: that counts as its seconds, too.

Looks at where things stand when a point ends: what memory holds by kind, and what was waited for and moved since.
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
"""So much of the limit is to stay free, whatever plans say: the kernel counts to some dozens of pages."""


@dataclass(frozen=True, kw_only=True)
class PointFigures:
    """What was seen of one point. Memory is None if not looked at.

    `extra_bytes` is what there was besides pieces and saved tensors, `unknown_bytes` of it when the point began, and
    `over_bytes` how far all came into what is to stay free. `needed_bytes` is the part of what it saved from which all
    can be computed again, None where it cannot. Seconds are None where to know them would have made a device wait.
    """

    seconds: float | None
    saved_bytes: int
    needed_bytes: int | None
    extra_bytes: int | None
    unknown_bytes: int = 0
    over_bytes: int = 0


class KnownPoints:
    """What each point takes, as far as it was seen.

    What is being read counts before its pages are there, so that the rest seems to be less than it is. So memory is
    learned while nothing moves, before there is a plan; under one it grows where the limit came near.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, tuple[float, int]] = {}  # seconds, and the most besides pieces and saved tensors
        self._own_bytes: dict[Hashable, int] = {}  # of that, what was not there before
        self.unknown_bytes = 0  # that the process held besides when a point began, at most since `begin_step`
        self.came_near = False  # of the limit, likewise

    def __contains__(self, point: Hashable) -> bool:
        return point in self._seen

    def learn(self, point: Hashable, figures: PointFigures, expected_bytes: int | None) -> tuple[float, int]:
        """Returns its seconds and extra bytes. Under a plan, `expected_bytes` are what was to be enough for these."""
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
        """Look anew at what is held besides."""
        self.unknown_bytes, self.came_near = 0, False

    def extra_bytes(self, point: Hashable, unknown_bytes: int) -> int:
        """What there will be besides pieces and saved tensors, if so much is there that nobody knows of."""
        return max(self._seen.get(point, (0.0, 0))[1], unknown_bytes + self._own_bytes.get(point, 0))


class PointMeter:
    """Begins and ends with each point. Seconds leave out what custody waited for.

    What the process held at first, before pieces and in all that follows, is nobody's business: `base_bytes`.
    """

    def __init__(self, custody: PieceStore, meter: MemoryMeter, base_bytes: int) -> None:
        self.is_cheap = not meter.runs_ahead  # to look closely, at each point of each step
        self.guard_bytes = int(GUARD_SHARE * custody.account.limit_bytes)
        self.saved_bytes = self.times_again = 0
        self.needed_bytes: int | None = None
        self._custody = custody
        self._meter = meter
        self._base_bytes = base_bytes
        self._again_s = 0.0
        # When a thread was free for the next point: its clock, what was waited until then, and who it is.
        self._freed = (0.0, 0.0, 0)
        self._since: tuple[float, float, int] | None = None  # likewise, of the point that has begun
        self._held_bytes: tuple[int, int] | None = None  # then: what was accounted for, and what was not

    def comes(self) -> None:
        """From now on the thread works for the next point: to have what it wants there takes time, too."""
        if not self._meter.runs_ahead:
            self._freed = self._now()

    def begin(self, *, with_memory: bool, is_short: bool = False) -> None:
        """A point begins: all that it wants is there. Where it is short, being so far ahead keeps no device busy."""
        self.saved_bytes, self._held_bytes, self._since = 0, None, None
        self.needed_bytes, self._again_s = None, 0.0
        if with_memory:
            # The peak over what is accounted for is what computing itself takes, with all that nobody here knows of:
            # small tensors, holes in the heap, buffers of libraries, Python's own objects.
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
        """What the process holds now that is not accounted for. A device frees later than is accounted for."""
        return self.is_cheap * max(0, self._meter.own_bytes()[0] - self._base_bytes - self._custody.accounted_bytes())

    def computed_again(self, seconds: float) -> None:
        """What was given up is there again: neither its seconds nor its memory are the point's own."""
        self.times_again += 1
        self._again_s += seconds
        if self._held_bytes is not None:
            self._held_bytes = max(self._held_bytes[0], self._custody.accounted_bytes()), self._held_bytes[1]

    def end(self) -> PointFigures:
        """What was seen since it began."""
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
            return None  # who serves a touch may update a block, and leave the point to another thread
        since_s, waited_s, _ = self._since
        apart_s = self._custody.waited_s - waited_s + self._again_s
        return max(0.0, self._meter.clock() - since_s - apart_s)


class StandingWatch:
    """Asked once at the end of each point, in the training thread."""

    def __init__(self, custody: PieceStore, saved: SavedTensors, devices: Sequence[Device]) -> None:
        self._custody = custody
        self._saved = saved
        self._devices = devices
        self._waited_s = 0.0
        self._moved = [(0, 0)] * len(devices)

    def take(self, pieces: Iterable[HeldPiece], extra_bytes: int | None) -> Standing | None:
        """How things stand; None where the point was not looked at closely (`extra_bytes` is None)."""
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
