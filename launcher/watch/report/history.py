"""The history of a run: values that the report draws, made of the lines of its logs. Times are seconds from the start.

Pure functions. A field that a line lacks, or that has an unexpected type, leaves the line out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from elastrain.launcher.watch.report.incidents import Incident, incidents_of
from elastrain.launcher.watch.report.run_logs import Line, RunLogs

Points = list[tuple[float, float]]
"""(seconds, value), by time."""


@dataclass(kw_only=True)
class MemberLife:
    """The life of one member. None: it has not come to that."""

    member: str
    started_s: float
    entered_s: float | None = None
    """Time when the first view with this member was agreed on."""
    ended_s: float | None = None
    is_lost: bool = False
    """True if the member died before its loop had ended."""


@dataclass(frozen=True, kw_only=True)
class TimelineMark:
    """An event at one moment: a checkpoint, an injected fault, or a finding of a check."""

    at_s: float
    text: str
    is_bad: bool = False


@dataclass(kw_only=True)
class Series:
    """The curves of the report."""

    step_s: Points = field(default_factory=list)
    loss: Points = field(default_factory=list)
    memory: dict[str, Points] = field(default_factory=dict)
    """Member -> bytes."""
    limit_bytes: int | None = None
    audits: Points = field(default_factory=list)
    """Number of micro-batches that members computed again to compare them, for each step."""


@dataclass(kw_only=True)
class History:
    """All that the report shows."""

    job: str
    began_wall: float | None
    length_s: float
    end: str
    """Reason of the end, or a sentence that says that there is none yet."""
    steps: int
    lives: list[MemberLife]
    series: Series
    checkpoints: list[TimelineMark]
    faults: list[TimelineMark]
    findings: list[TimelineMark]
    incidents: list[Incident]
    unreadable: int = 0


def history_of(logs: RunLogs, over: str) -> History:
    """Return the history. `over`: the sentence for a run without an `end` line."""
    times = [float(line["t"]) for lines in (logs.events, *logs.journals.values()) for line in lines[:1] + lines[-1:]]
    zero, last = (min(times), max(times)) if times else (0.0, 0.0)
    started = _of(logs.events, "start")
    ends = [line for line in _of(logs.events, "end") if isinstance(line.get("reason"), str)]
    series, steps = _series(logs, zero)
    return History(
        job=str(started[0].get("job", "")) if started else "",
        began_wall=_wall(started[0].get("wall")) if started else None,
        length_s=last - zero,
        end=ends[-1]["reason"] if ends else over,
        steps=steps,
        lives=_lives(logs.events, zero),
        series=series,
        checkpoints=[_checkpoint(line, zero) for line in _of(logs.events, "checkpoint")],
        faults=_faults(logs, zero),
        findings=_findings(logs, zero),
        incidents=incidents_of(logs, zero),
        unreadable=logs.unreadable,
    )


_YEAR_5000 = 9.6e10


def _wall(value: Any) -> float | None:
    """Return seconds since 1970, or None for a value that is no such time."""
    return float(value) if isinstance(value, int | float) and 0 <= value < _YEAR_5000 else None


def _of(lines: Iterable[Line], *events: str) -> list[Line]:
    return [line for line in lines if line["event"] in events]


def _lives(events: Sequence[Line], zero: float) -> list[MemberLife]:
    lives: dict[str, MemberLife] = {}
    finished = {line.get("member") for line in _of(events, "finished")}
    for line in events:
        at_s, member = float(line["t"]) - zero, line.get("member")
        if line["event"] == "worker_start" and isinstance(member, str):
            lives[member] = MemberLife(member=member, started_s=at_s)
        elif line["event"] == "view":
            for name in _names(line.get("members")):
                life = lives.setdefault(name, MemberLife(member=name, started_s=at_s))
                life.entered_s = at_s if life.entered_s is None else life.entered_s
        elif line["event"] in ("death", "exit") and member in lives and lives[member].ended_s is None:
            lives[member].ended_s, lives[member].is_lost = at_s, member not in finished
    return sorted(lives.values(), key=lambda life: (life.started_s, life.member))


def _names(value: Any) -> list[str]:
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []


def _series(logs: RunLogs, zero: float) -> tuple[Series, int]:
    """Return the curves, and the number of committed steps."""
    series, audits = Series(), dict[int, int]()
    passed: dict[int, tuple[float, Any]] = {}
    for member, lines in logs.journals.items():
        for line in lines:
            at_s, step = float(line["t"]) - zero, line.get("step")
            if line["event"] == "passed" and isinstance(step, int):
                if step not in passed or at_s < passed[step][0]:
                    passed[step] = (at_s, line.get("loss"))
            elif line["event"] in ("cross_check", "audit") and isinstance(step, int):
                audits[step] = audits.get(step, 0) + 1
            elif line["event"] in ("memory", "work"):
                _note_memory(series, member, at_s, line)
    steps = sorted(passed.items())
    series.loss = [(at_s, float(loss)) for _, (at_s, loss) in steps if isinstance(loss, int | float)]
    series.step_s = [
        (now[1][0], now[1][0] - before[1][0]) for before, now in pairwise(steps) if now[0] == before[0] + 1
    ]
    series.audits = [(passed[step][0], float(count)) for step, count in sorted(audits.items()) if step in passed]
    return series, len(steps)


def _note_memory(series: Series, member: str, at_s: float, line: Mapping[str, Any]) -> None:
    held, limit = line.get("peak_bytes", line.get("memory_bytes")), line.get("memory_limit_bytes")
    if isinstance(held, int):
        series.memory.setdefault(member, []).append((at_s, float(held)))
    if isinstance(limit, int):
        series.limit_bytes = limit


def _checkpoint(line: Mapping[str, Any], zero: float) -> TimelineMark:
    reason, step = line.get("reason"), line.get("step", "?")
    took_s = line.get("took_s")
    took = f", {took_s:.1f} s" if isinstance(took_s, int | float) and took_s else ""
    text = f"checkpoint of step {step} given up: {reason}" if reason else f"checkpoint of step {step} complete{took}"
    return TimelineMark(at_s=float(line["t"]) - zero, text=text, is_bad=bool(reason))


def _faults(logs: RunLogs, zero: float) -> list[TimelineMark]:
    """Return the faults that were injected on request, when they struck: inside of members, and by agents."""
    found = []
    for member, lines in logs.journals.items():
        for line in _of(lines, "fault"):
            where = f" in step {line.get('step')}, {line.get('phase')}" if line.get("phase") else ""
            found.append(
                TimelineMark(at_s=float(line["t"]) - zero, text=f"{line.get('kind', 'fault')} of {member}{where}")
            )
    for line in _of(logs.events, "kill_node", "etcd_killed", "etcd_stopped"):
        found.append(TimelineMark(at_s=float(line["t"]) - zero, text=line["event"].replace("_", " ")))
    return sorted(found, key=lambda mark: mark.at_s)


def _findings(logs: RunLogs, zero: float) -> list[TimelineMark]:
    """Return what members have found wrong by comparing, each text once."""
    found: dict[str, TimelineMark] = {}
    for lines in logs.journals.values():
        for line in _of(lines, "warning", "noticed", "anew"):
            text = str(line.get("reason", line["event"]))
            found.setdefault(text, TimelineMark(at_s=float(line["t"]) - zero, text=text, is_bad=True))
    return sorted(found.values(), key=lambda mark: mark.at_s)


def thinned(points: Points, most: int) -> Points:
    """Return at most about `most` points: of each stretch of time the lowest, the median and the highest value.

    So no outlier disappears from a curve.
    """
    if len(points) <= most:
        return points
    size = -(-3 * len(points) // most)
    found: Points = []
    for begin in range(0, len(points), size):
        part = points[begin : begin + size]
        kept = {min(part, key=lambda each: each[1]), max(part, key=lambda each: each[1])}
        middle = median(value for _, value in part)
        found += sorted(kept | {min(part, key=lambda each: abs(each[1] - middle))})
    return found
