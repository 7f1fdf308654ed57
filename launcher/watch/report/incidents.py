"""The incidents of a run: changes of the view after the first one, with the phases by which the job got over them.

An incident begins when a member's death was detected; without a death, when the view was agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrain.launcher.watch.report.run_logs import Line, RunLogs

PHASES = ("found", "agreed", "edited", "recovered", "whole again")
"""The phases in their order. Each ends at the moment that gives it its name."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One change of the view. `ends_s`: end of each phase of `PHASES` in seconds of the run, None if not known."""

    generation: int
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    reason: str
    begins_s: float
    ends_s: tuple[float | None, ...]

    @property
    def took_ms(self) -> tuple[float | None, ...]:
        """Milliseconds of each phase, from the end of the last phase before it whose end is known."""
        took, before_s = list[float | None](), self.begins_s
        for end_s in self.ends_s:
            took.append(None if end_s is None else max(0.0, 1000 * (end_s - before_s)))
            before_s = before_s if end_s is None else max(before_s, end_s)
        return tuple(took)

    @property
    def total_ms(self) -> float:
        """Milliseconds from the beginning to the last phase that has ended."""
        return 1000 * (max([self.begins_s, *(end for end in self.ends_s if end is not None)]) - self.begins_s)


def incidents_of(logs: RunLogs, zero: float) -> list[Incident]:
    """Return the incidents, the oldest first. `zero`: monotonic time of the run's start."""
    views, times = _views(logs.events), _Times(logs)
    found = []
    for place in range(1, len(views)):
        (number, view), (_, before) = views[place], views[place - 1]
        next_s = float(views[place + 1][1]["t"]) if place + 1 < len(views) else float("inf")
        old, new = _members(before), _members(view)
        lost = tuple(member for member in old if member not in new)
        begins_s, ends_s = times.of(number, float(view["t"]), lost, next_s)
        found.append(
            Incident(
                generation=number,
                lost=lost,
                joined=tuple(member for member in new if member not in old),
                reason=str(view.get("reason", "")),
                begins_s=begins_s - zero,
                ends_s=tuple(None if end_s is None else end_s - zero for end_s in ends_s),
            )
        )
    return found


class _Times:
    """The times of all phases in the logs, in monotonic seconds."""

    def __init__(self, logs: RunLogs) -> None:
        self._deaths = _deaths(logs.events)
        self._edits, self._resumes = (_last_of_generation(logs, event) for event in ("edit", "resumed"))
        self._windows = [(float(line["t"]), line.get("window")) for line in logs.events if line["event"] == "window"]
        self._strikes = {
            member: float(line["t"]) for member, lines in logs.journals.items() for line in lines if _is_kill(line)
        }

    def of(
        self, number: int, agreed_s: float, lost: Sequence[str], next_s: float
    ) -> tuple[float, tuple[float | None, ...]]:
        """Return the beginning of a view's incident, and the end of each phase. `next_s`: time of the next view."""
        signs = [self._deaths[member] for member in lost if member in self._deaths]
        strikes = [self._strikes[member] for member in lost if member in self._strikes]
        begins_s = min([agreed_s, *(first_s for first_s, _ in signs), *strikes])
        found_s = min([agreed_s, *(handled_s for _, handled_s in signs)])
        recovered_s = self._resumes.get(number)
        return begins_s, (found_s, agreed_s, self._edits.get(number), recovered_s, self._whole_s(recovered_s, next_s))

    def _whole_s(self, recovered_s: float | None, next_s: float) -> float | None:
        """Return when every shard had all its holders again. With a window still open at the next view: None."""
        if recovered_s is None:
            return None
        is_open = False
        for at_s, what in self._windows:
            if at_s >= next_s:
                break
            is_open = what == "opened"
            # The members report a window up to a second after they have resumed.
            if at_s >= recovered_s and what == "closed":
                return at_s
        return None if is_open else recovered_s


def _members(view: Line) -> list[str]:
    return [member for member in view["members"] if isinstance(member, str)]


def _is_kill(line: Line) -> bool:
    return line["event"] == "fault" and line.get("kind") in ("kill", "exit")


def _views(events: Sequence[Line]) -> list[tuple[int, Line]]:
    """Return the first line of each generation. All agents log a view."""
    first: dict[int, Line] = {}
    for line in events:
        number = line.get("generation")
        if line["event"] == "view" and isinstance(number, int) and isinstance(line.get("members"), list):
            first.setdefault(number, line)
    return sorted(first.items())


def _deaths(events: Sequence[Line]) -> dict[str, tuple[float, float]]:
    """Return member -> (time of the first sign of its death, time when the agent has handled it)."""
    found: dict[str, tuple[float, float]] = {}
    for line in events:
        member, signs_s = line.get("member"), line.get("detected_s", line["t"])
        if line["event"] == "death" and isinstance(member, str) and isinstance(signs_s, int | float):
            found.setdefault(member, (float(signs_s), float(line["t"])))
    return found


def _last_of_generation(logs: RunLogs, event: str) -> dict[int, float]:
    """Return generation -> time when the last member wrote this event for the first time."""
    last: dict[int, float] = {}
    for lines in logs.journals.values():
        seen: set[int] = set()
        for line in lines:
            number = line.get("generation")
            if line["event"] == event and isinstance(number, int) and number not in seen:
                seen.add(number)
                last[number] = max(last.get(number, 0.0), float(line["t"]))
    return last
