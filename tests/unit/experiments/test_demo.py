"""The demo waits for its jobs while they move, on a machine however busy, and no longer."""

from __future__ import annotations

from typing import Any, cast

import pytest

from experiments.demo import run


class Clock:
    """Time passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Job:
    """Ends after `steps`, of which each takes `step_s`; or stands still in step `stuck`."""

    def __init__(self, clock: Clock, *, steps: int, step_s: float, stuck: int | None = None) -> None:
        self._clock, self._steps, self._step_s, self._stuck = clock, steps, step_s, stuck

    def done(self) -> int:
        passed = int(self._clock.now_s / self._step_s)
        return min(passed, self._steps if self._stuck is None else self._stuck)

    def poll(self) -> int | None:
        return 0 if self.done() == self._steps else None


def waited_s(monkeypatch: pytest.MonkeyPatch, **job: Any) -> float:
    clock = Clock()
    monkeypatch.setattr(run, "time", clock)
    started = Job(clock, **job)
    run._until_end(cast(Any, started), started.done)
    return clock.now_s


def test_a_slow_job_is_waited_for_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited_s(monkeypatch, steps=20, step_s=0.9 * run.STILL_S) == pytest.approx(18 * run.STILL_S, rel=0.01)


def test_a_job_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found_s = waited_s(monkeypatch, steps=20, step_s=10.0, stuck=4)
    assert found_s == pytest.approx(40 + run.STILL_S, rel=0.01)
