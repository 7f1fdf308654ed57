"""The arithmetic of goodput, and the schedule of kills. No process, no file and no clock may come in here.

What the figure means is in the README.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

SPREAD = (0.5, 1.5)
"""Two kills lie so many means apart, uniformly: a schedule of a few kills then has nearly the rate that it says."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """A kill that is due `after_s` after the schedule's begin, of whoever trains at this place then."""

    after_s: float
    place: int


@dataclass(frozen=True, kw_only=True)
class Commit:
    """A step is behind the job. `share`: how much of the global batch it was computed from, 0..1."""

    step: int
    at_s: float
    share: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Absence:
    """A place is empty: from a kill of the schedule until the next process there is started."""

    place: int
    from_s: float
    until_s: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """From the last commit before the schedule to the first one after it, so that nothing it cost lies outside."""

    from_s: float
    until_s: float

    @property
    def length_s(self) -> float:
        return self.until_s - self.from_s


def schedule(*, seed: int, every_s: float, count: int, places: int) -> tuple[Strike, ...]:
    """`count` kills, `every_s` apart in the mean. Pure: the same for every system."""
    chance = random.Random(f"goodput {seed} {every_s:g}")
    moments = accumulate(every_s * chance.uniform(*SPREAD) for _ in range(count))
    return tuple(Strike(after_s=at_s, place=chance.randrange(places)) for at_s in moments)


def progress(commits: Iterable[Commit]) -> list[Commit]:
    """In order of time, those that brought the job further than it had ever been.

    A step that is done again after a restart counts where it was done first: what follows costs time and adds nothing.
    """
    found: list[Commit] = []
    for commit in sorted(commits, key=lambda each: (each.at_s, each.step)):
        if not found or commit.step > found[-1].step:
            found.append(commit)
    return found


def usual_step_s(commits: Sequence[Commit], *, until_s: float, without: int = 2) -> float:
    """The median step before `until_s`, the first ones left out. Raises ValueError if there are fewer than three."""
    ends_s = [commit.at_s for commit in progress(commits) if commit.at_s <= until_s][without:]
    walls_s = [later - earlier for earlier, later in pairwise(ends_s)]
    if len(walls_s) < 3:
        raise ValueError(f"expected at least 3 undisturbed steps before the first kill; there were {len(walls_s)}")
    return statistics.median(walls_s)


def window(commits: Sequence[Commit], *, from_s: float, until_s: float) -> Window | None:
    """None until the job has come further after the schedule's end. Raises ValueError without a commit before it."""
    steps = progress(commits)
    before = [commit.at_s for commit in steps if commit.at_s <= from_s]
    if not before:
        raise ValueError("expected a commit before the schedule's begin")
    after = [commit.at_s for commit in steps if commit.at_s >= until_s]
    return Window(from_s=before[-1], until_s=after[0]) if after else None


def steps_inside(commits: Sequence[Commit], where: Window) -> float:
    """How many whole steps the job came forward in the window; a step of three of four members counts as 0.75."""
    return sum(commit.share for commit in progress(commits) if where.from_s < commit.at_s <= where.until_s)


def alive_s(absences: Iterable[Absence], where: Window, *, places: int) -> float:
    """The integral of (members alive / members configured) over the window."""
    empty_s = sum(max(0.0, min(each.until_s, where.until_s) - max(each.from_s, where.from_s)) for each in absences)
    return where.length_s - empty_s / places


def goodput(
    commits: Sequence[Commit], absences: Iterable[Absence], where: Window, *, places: int, step_s: float
) -> float:
    """Committed steps × the undisturbed step's seconds ÷ the living members' seconds: 1 if nothing is lost but them."""
    return steps_inside(commits, where) * step_s / alive_s(absences, where, places=places)
