"""Measures one point at a time: its seconds without waits, what it takes besides pieces, what it saves.

To have there what a point uses is work of the same thread: that counts as its seconds, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastrain.offload.lifetimes.custody import PieceCustody
from elastrain.offload.lifetimes.memory import MemoryMeter


@dataclass(frozen=True, kw_only=True)
class PointFigures:
    """What was seen of one point. `over_bytes` is how far memory came over the limit; memory is None if not looked at.

    `extra_bytes` is what it took besides pieces and saved tensors; `needed_bytes` is the part of what it saved from
    which all can be computed again, None where it cannot. Seconds are None where to know them would have made a device
    wait.
    """

    seconds: float | None
    saved_bytes: int
    needed_bytes: int | None
    extra_bytes: int | None
    over_bytes: int


class PointMeter:
    """Begins and ends with each point. Seconds leave out what custody waited for.

    What the process held at first, before pieces and in all that follows, is nobody's business: `base_bytes`.
    """

    def __init__(self, custody: PieceCustody, meter: MemoryMeter, base_bytes: int) -> None:
        self.saved_bytes = self.times_again = 0
        self.needed_bytes: int | None = None
        self._custody = custody
        self._meter = meter
        self._base_bytes = base_bytes
        self._since_s: float | None = None
        self._waited_s = self._again_s = 0.0
        self._freed = 0.0, 0.0  # when the thread was free for the next point: the clock, and what was waited until then
        self._accounted_bytes: int | None = None  # when the point began

    def comes(self) -> None:
        """From now on the thread works for the next point: to have what it wants there takes time, too."""
        if not self._meter.runs_ahead:
            self._freed = self._meter.clock(), self._custody.waited_s

    def begin(self, *, with_memory: bool) -> None:
        """A point begins: all that it wants is there."""
        self.saved_bytes, self._accounted_bytes, self._since_s = 0, None, None
        self.needed_bytes, self._again_s = None, 0.0
        if with_memory:
            # The peak over what is accounted for is what computing itself takes, with all that nobody here knows of:
            # small tensors, holes in the heap, buffers of libraries, Python's own objects.
            self._meter.forget_peak()
            self._accounted_bytes = self._custody.accounted_bytes()
        if self._meter.runs_ahead and not with_memory:
            self._meter.keep_pace()
            return
        self._since_s, self._waited_s = (
            (self._meter.clock(), self._custody.waited_s) if self._meter.runs_ahead else self._freed
        )

    def computed_again(self, seconds: float) -> None:
        """What was given up is there again: neither its seconds nor its memory are the point's own."""
        self.times_again += 1
        self._again_s += seconds
        if self._accounted_bytes is not None:
            self._accounted_bytes = max(self._accounted_bytes, self._custody.accounted_bytes())

    def end(self) -> PointFigures:
        """What was seen since it began."""
        seconds = self._seconds()
        self.comes()
        if self._accounted_bytes is None:
            return PointFigures(
                seconds=seconds,
                saved_bytes=self.saved_bytes,
                needed_bytes=self.needed_bytes,
                extra_bytes=None,
                over_bytes=0,
            )
        most_bytes = self._meter.own_bytes()[1] - self._base_bytes
        accounted_bytes = max(self._accounted_bytes, self._custody.accounted_bytes())
        return PointFigures(
            seconds=seconds,
            saved_bytes=self.saved_bytes,
            needed_bytes=self.needed_bytes,
            extra_bytes=max(0, most_bytes - accounted_bytes),
            over_bytes=max(0, most_bytes - self._custody.account.limit_bytes),
        )

    def _seconds(self) -> float | None:
        if self._since_s is None:
            return None
        apart_s = self._custody.waited_s - self._waited_s + self._again_s
        return max(0.0, self._meter.clock() - self._since_s - apart_s)
