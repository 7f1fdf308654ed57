"""From the peers' journals to standstills. Reading and arithmetic only."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from experiments.journals import Tail
from experiments.recovery.figures import longest_gap_s


@dataclass(kw_only=True)
class Life:
    """What one process did."""

    rank: int
    ticks_s: list[float] = field(default_factory=list)
    """Moments at which a part of its own computation was done."""
    steps_s: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each step that was kept."""
    attempt_s: float = 0.0
    """Begin of the newest one."""
    killed_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one kill, in seconds."""

    standstill_s: float
    """The longest time in which none of the others computed."""
    kept_after_s: float
    """Until one of them began a step that was kept: what they computed before that was thrown away."""


class Lives:
    """All processes of a job, read while it goes on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tails: dict[Path, Tail] = {}
        self.of: dict[str, Life] = {}

    def look(self) -> Mapping[str, Life]:
        """By the name of the journal."""
        for path in self._folder.glob("*.jsonl"):
            life = self.of.setdefault(path.stem, Life(rank=int(path.stem.split("-")[0])))
            for line in self._tails.setdefault(path, Tail(path)).read():
                match line["event"]:
                    case "tick":
                        life.ticks_s.append(line["t"])
                    case "attempt":
                        life.attempt_s = line["t"]
                    case "step":
                        life.steps_s.append((life.attempt_s, line["t"]))
                    case "kill":
                        life.killed_s = line["t"]
        return self.of


def undisturbed_s(lives: Mapping[str, Life]) -> float | None:
    """The ordinary gap: the longest time without a tick of anybody in a step before the first kill, the median over
    those steps after the first; None if there were none. Between the last backward and the next forward, mostly."""
    until_s = min(kills(lives), default=float("inf"))
    first = [life for life in lives.values() if life.steps_s and life.steps_s[0][1] < until_s]
    if not first:
        return None
    ends = [end_s for _, end_s in first[0].steps_s if end_s < until_s]
    ticks = [(at_s, at_s) for life in lives.values() for at_s in life.ticks_s if at_s < until_s]
    # From the middle of a step to the middle of the next: the gap lies around the end.
    middles = [(before + after) / 2 for before, after in pairwise(ends)]
    if middles:
        middles.append(min(until_s, ends[-1] + (ends[-1] - ends[-2]) / 2))
    gaps = [longest_gap_s(_within(ticks, begin, end), begin, end) for begin, end in pairwise(middles)]
    return statistics.median(gaps) if gaps else None


def _within(ticks: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> list[tuple[float, float]]:
    return [tick for tick in ticks if begin_s <= tick[0] <= end_s]


def kills(lives: Mapping[str, Life]) -> list[float]:
    return sorted(life.killed_s for life in lives.values() if life.killed_s is not None)


def survivors(lives: Mapping[str, Life], killed_s: float, *, of_its_rank: bool) -> list[Life]:
    """All but the life that ended then; `of_its_rank`: also those that came in its place."""
    victim = next(life for life in lives.values() if life.killed_s == killed_s)
    return [life for life in lives.values() if life is not victim and (of_its_rank or life.rank != victim.rank)]


def recovered_s(others: Sequence[Life], killed_s: float) -> float | None:
    """When the first of them had ended its second step after the kill; None if that has not happened yet."""
    ends = [[end_s for _, end_s in life.steps_s if end_s > killed_s] for life in others]
    return min((later[1] for later in ends if len(later) > 1), default=None)


def cost_of(others: Sequence[Life], killed_s: float) -> Cost:
    """What the kill cost the others, up to the end of two further steps. Raises ValueError if there are none."""
    until_s = recovered_s(others, killed_s)
    if until_s is None:
        raise ValueError("expected two more steps after the kill; the job did not go on")
    ticks = [(at_s, at_s) for life in others for at_s in life.ticks_s if at_s >= killed_s]
    kept_s = min(begin_s for life in others for begin_s, end_s in life.steps_s if end_s > killed_s)
    return Cost(standstill_s=longest_gap_s(ticks, killed_s, until_s), kept_after_s=max(0.0, kept_s - killed_s))


def costs(lives: Mapping[str, Life], *, of_its_rank: bool) -> list[Cost]:
    """One per kill."""
    return [cost_of(survivors(lives, at_s, of_its_rank=of_its_rank), at_s) for at_s in kills(lives)]
