"""The time of one action of a pipeline's member. A forward is timed where its blocks are entered.

Events lie in the loop's stream, so on a device the time is the device's own. The loop's thread waits for nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise

from elastrain.device import DeviceEvent, DevicePort
from elastrain.pipeline.actions import TaskAction
from elastrain.pipeline.pipeline_plan import Task
from elastrain.runtime.loop.computed_run import StepParts


class ActionTimer:
    """A timer for one action. The results may be read once the action has landed."""

    def __init__(self, port: DevicePort, task: Task) -> None:
        self._port, self._task = port, task
        self._began: DeviceEvent | None = None
        self._let_in: DeviceEvent | None = None
        """Recorded behind what holds the action up before it computes."""
        self._marks: list[tuple[int | None, DeviceEvent]] = []
        """(block that computes from here on, event). None: none of the task's blocks computes."""

    @contextmanager
    def around(self, computing: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
        """Enter `computing`. The time that the entry takes counts, too."""
        self.begin()
        with computing():
            self._let_in = self._port.record(timing=True)
            yield

    def begin(self) -> None:
        """Start the time, unless it has started."""
        self._began = self._began or self._port.record(timing=True)

    def enter(self, place: int) -> None:
        """Note that the forward enters a block."""
        block = place if place in self._task.blocks else None
        # Blocks that are absent need no mark of their own.
        if block is not None or (self._marks and self._marks[-1][0] is not None):
            self._marks.append((block, self._port.record(timing=True)))

    def end(self) -> None:
        """End the time."""
        self._marks.append((None, self._port.record(timing=True)))

    def forward_s(self) -> tuple[float, ...]:
        """Return the seconds of each block of the task, or () if the forward has entered none of them."""
        seconds = dict.fromkeys(self._task.blocks, 0.0)
        for (block, begin), (_, end) in pairwise(self._marks):
            if block is not None:
                seconds[block] += begin.elapsed_s(end)
        whole_s = sum(seconds.values())
        if not whole_s or self._began is None or self._let_in is None:
            return ()
        # What holds up the whole action is divided among its blocks, as code between them is not.
        factor = 1.0 + self._began.elapsed_s(self._let_in) / whole_s
        return tuple(each * factor for each in seconds.values())

    def backward_s(self) -> tuple[float, ...]:
        """Return the seconds from the beginning to the end, or () if there was none."""
        return (self._began.elapsed_s(self._marks[-1][1]),) if self._began is not None and self._marks else ()


class LoopClock:
    """The host's time around actions: what they take beside their blocks shows in it."""

    def __init__(self) -> None:
        self._began_s = self._ended_s = time.monotonic()

    def begin(self) -> None:
        """Note that the loop's thread was given an action."""
        self._began_s = time.monotonic()

    def end(self) -> tuple[float, float]:
        """Return the seconds from the last end to the begin, and from there to now, where an action ends."""
        before_s, self._ended_s = self._ended_s, time.monotonic()
        return self._began_s - before_s, self._ended_s - self._began_s


def log_action(parts: StepParts, step: int, action: TaskAction, started_s: float) -> None:
    """Write a line about an action to the journal. It shows which time the action took."""
    task = action.task
    where = {"run": task.run, "begin": task.begin, "end": task.end, "started_s": started_s}
    parts.log("task", step=step, kind=str(action.kind), micro_batch=action.micro_batch, **where)
