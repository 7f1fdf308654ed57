"""How long each thread of a worker has shown no sign of life, as its agent saw it; and how long it may."""

from __future__ import annotations

from dataclasses import dataclass, field

from elastrain.base.places import Spot, Station
from elastrain.launcher.core.events import Seen, SeenThread
from elastrain.launcher.core.pace import Pace
from elastrain.launcher.times import HangTimes

_STEPS = 2.5
"""So many median steps a member for whom others wait may stand still."""
_STEPS_OF_A_JOINER = 20.0
_BEYOND_THE_LONGEST = 1.5
_ENGINE_ROUND_S = 1.0
"""An engine in good health has come round by then, at least once."""


@dataclass(kw_only=True)
class Standstill:
    """One thread's standstill. `for_s` counts only time in which it could have run and its agent looked."""

    spot: Spot = field(default_factory=Spot)
    for_s: float = 0.0
    starved_s: float = 0.0
    was_stopped: bool = False

    def see(self, seen: SeenThread, passed_s: float, *, stopped: bool) -> float:
        """Look at a thread. Returns how long it had stood where it was, if it has moved by itself since; else 0."""
        starved_s, self.starved_s = seen.starved_s - self.starved_s, seen.starved_s
        if seen.spot == self.spot:
            # Where processors are scarce, a thread that waits for one stands still and is in good health.
            self.for_s += max(0.0, passed_s - max(0.0, starved_s))
            self.was_stopped |= stopped
            return 0.0
        stood_s = 0.0 if self.was_stopped else self.for_s
        self.spot, self.for_s, self.was_stopped = seen.spot, 0.0, stopped
        return stood_s


@dataclass(kw_only=True)
class Stand:
    """The standstills of one worker's threads."""

    loop: Standstill = field(default_factory=Standstill)
    engine: Standstill = field(default_factory=Standstill)
    stopped: bool = False
    """The kernel says that the process is stopped."""

    def see(self, seen: Seen, passed_s: float, pace: Pace) -> None:
        loop, engine = self.loop.spot, self.engine.spot
        self.stopped = seen.stopped
        stood_s = self.loop.see(seen.loop, passed_s, stopped=seen.stopped)
        if loop.place in (Station.COMPUTING, Station.BETWEEN):
            pace.note(loop.place, stood_s)
        stood_s = self.engine.see(seen.engine, passed_s, stopped=seen.stopped)
        if engine.place is Station.TURNING and loop.place in (Station.COMPUTING, Station.WAITING):
            pace.note(engine.place, stood_s)

    @property
    def waits(self) -> bool:
        """Whether it has nothing left to do and its engine turns."""
        return self.loop.spot.place is Station.WAITING and not self.stopped and self.engine.for_s < _ENGINE_ROUND_S


@dataclass(frozen=True, kw_only=True)
class Overdue:
    """A thread has stood for longer than it may; `where` in words, for people."""

    where: str
    for_s: float
    limit_s: float
    thread: Standstill


def overdue(stand: Stand, *, pace: Pace, times: HangTimes, is_new: bool) -> Overdue | None:
    """Whether one of the worker's threads stands for too long, were others waiting for it. `is_new`: it has not
    committed a step yet.
    """
    short_s = max(times.hang_timeout_s, _STEPS * (pace.step_s or 0.0))
    loop, engine = stand.loop, stand.engine
    if stand.stopped:
        return _over("stopped by a signal or a debugger, in the middle", engine, short_s)
    usual_s = _early_s(pace, times, is_new=is_new) if is_new or pace.step_s is None else short_s
    learned_s = max(usual_s, _BEYOND_THE_LONGEST * pace.longest_s(loop.spot.place))
    by_place = {
        Station.COMPUTING: ("in a micro-batch", learned_s),
        Station.BETWEEN: ("in the script's code between two steps", max(learned_s, times.between_steps_s)),
        Station.DECLARED: (f"in {loop.spot.name}", loop.spot.allowed_s),
    }
    where, limit_s = by_place.get(loop.spot.place, ("", 0.0))
    # Whoever holds the interpreter for a declared stretch, or between steps, keeps the engine from turning, too.
    turning_s = max(usual_s, limit_s, _BEYOND_THE_LONGEST * pace.longest_s(Station.TURNING))
    if engine.spot.place is Station.TURNING:
        held = _over(
            f"its engine too (a held interpreter lock, or a drive), {where or 'waiting for others'}", engine, turning_s
        )
        if held is not None:
            return held
    return _over(where, loop, limit_s) if limit_s else None


def _over(where: str, thread: Standstill, limit_s: float) -> Overdue | None:
    if not thread.for_s > limit_s:
        return None
    return Overdue(where=where, for_s=thread.for_s, limit_s=limit_s, thread=thread)


def _early_s(pace: Pace, times: HangTimes, *, is_new: bool) -> float:
    """Nothing is known of a first step, which compiles and warms up, but what the others' steps take."""
    if pace.step_s is None:
        return times.first_step_s if is_new else times.join_step_s
    return max(times.join_step_s, _STEPS_OF_A_JOINER * pace.step_s)
