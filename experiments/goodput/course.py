"""Drives one job through the schedule: undisturbed steps, the kills, and on to the next commit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from experiments.goodput import figures
from experiments.goodput.figures import Absence, Commit, Strike, Window
from experiments.goodput.systems import Process, System

LOOK_EVERY_S = 0.02
UNDISTURBED_STEPS = 12
"""Trained by all members before the schedule begins; the median step is taken from them."""
STILL_S = 240.0
"""So long a job may take to what is waited for."""


@dataclass(kw_only=True)
class Course:
    """What was done to one job, and what it did. Times are monotonic seconds."""

    system: System
    members: int
    begun_s: float = 0.0
    """When the schedule began."""
    ended_s: float = 0.0
    killed_s: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Process -> its place, and when it was struck."""
    processes: Sequence[Process] = ()
    commits: Sequence[Commit] = ()

    def run(self, strikes: Sequence[Strike], every_s: float) -> None:
        """Raises RuntimeError if the job stands still or ends."""
        self._wait_for("all members train", self._is_undisturbed)
        self.begun_s = time.monotonic()
        for strike in strikes:
            self._look_until(self.begun_s + strike.after_s)
            self._strike(strike.place)
        self.ended_s = max(self.begun_s + len(strikes) * every_s, time.monotonic())
        self._wait_for("a step is committed after the last kill", lambda: self.window is not None)

    @property
    def window(self) -> Window | None:
        return figures.window(self.commits, from_s=self.begun_s, until_s=self.ended_s)

    @property
    def step_s(self) -> float:
        return figures.usual_step_s(self.commits, until_s=self.begun_s)

    @property
    def absences(self) -> list[Absence]:
        """From each kill until the next process at that place is started."""
        return self._absences(lambda process: process.started_s)

    @property
    def absences_until_they_train(self) -> list[Absence]:
        """From each kill until the next process at that place computes."""
        return self._absences(lambda process: process.trains_s)

    def _absences(self, back_s: Callable[[Process], float | None]) -> list[Absence]:
        found = []
        for place, at_s in self.killed_s.values():
            moments = [back_s(each) for each in self.processes if each.place == place and each.started_s > at_s]
            back = min((moment for moment in moments if moment is not None), default=float("inf"))
            found.append(Absence(place=place, from_s=at_s, until_s=back))
        return found

    def _is_undisturbed(self) -> bool:
        places = {each.place for each in self.processes if each.trains}
        whole = [commit for commit in figures.progress(self.commits) if commit.share == 1.0]
        return len(places) == self.members and len(whole) >= UNDISTURBED_STEPS

    def _victim(self, place: int) -> Process | None:
        """Who trains there; None while nobody does. A process that still starts is waited for."""
        newest = next((each for each in reversed(self.processes) if each.place == place), None)
        return newest if newest is not None and newest.trains and newest.pid not in self.killed_s else None

    def _strike(self, place: int) -> None:
        self._wait_for(f"somebody who trains at place {place} was struck", lambda: self._has_struck(place))

    def _has_struck(self, place: int) -> bool:
        victim = self._victim(place)
        if victim is None:
            return False
        try:
            os.kill(victim.pid, signal.SIGKILL)
        except ProcessLookupError:  # its own system has ended it meanwhile: the next one there is waited for
            return False
        self.killed_s[victim.pid] = place, time.monotonic()
        return True

    def _look(self) -> None:
        self.processes, self.commits = self.system.look()
        time.sleep(LOOK_EVERY_S)

    def _look_until(self, at_s: float) -> None:
        while time.monotonic() < at_s:
            self._look()

    def _wait_for(self, what: str, there: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + STILL_S
        while not there():
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited for {STILL_S:g} s until {what}")
            self._look()
