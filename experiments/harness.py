"""What every experiment shares: interleaved runs, medians and ratios, machine facts, kept results, a last line of JSON.

Only measuring and reporting comes in here; nothing of one particular question.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A figure that an experiment wants to reach: `value <= limit`, or `>=` with `at_least`."""

    limit: float
    at_least: bool = False

    def __str__(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.limit:g}"

    def met(self, value: float | None) -> bool:
        """False also for a figure that could not be measured."""
        if value is None or math.isnan(value):
            return False
        return value >= self.limit if self.at_least else value <= self.limit


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear interpolation between order statistics. Raises ValueError on no values or a fraction outside [0, 1]."""
    if not values or not 0 <= fraction <= 1:
        raise ValueError(f"expected at least one value and a fraction in [0, 1]; got {len(values)} and {fraction}")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def ratio(candidate: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over the rounds of candidate/baseline of the same round: what disturbs a whole round cancels out.

    Raises ValueError if the two do not have the same, non-zero number of rounds.
    """
    if not candidate or len(candidate) != len(baseline):
        raise ValueError(f"expected one figure per round from both; got {len(candidate)} and {len(baseline)}")
    return statistics.median(a / b for a, b in zip(candidate, baseline, strict=True))


def interleave(cases: Mapping[str, Callable[[], T]], *, rounds: int) -> dict[str, list[T]]:
    """Run A, B, C, then C, B, A, … so that slow drift of the machine falls on all cases alike."""
    found: dict[str, list[T]] = {name: [] for name in cases}
    for index in range(rounds):
        for name in list(cases)[:: -1 if index % 2 else 1]:
            found[name].append(cases[name]())
    return found


def machine() -> dict[str, Any]:
    """Facts that a figure means nothing without."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
        "torch": _torch_version(),
        "load_1min": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit of this tree, with `+` when tracked files differ from it; `unknown` outside a repository."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip()


def add_record_flag(parser: argparse.ArgumentParser) -> None:
    """`--record`, alike in every experiment: results and pictures are tracked files, and change only when asked."""
    parser.add_argument("--record", action="store_true", help="append the figures to the results, draw the pictures")


def record(
    experiment: str,
    figures: Mapping[str, Any],
    *,
    quick: bool,
    settings: Mapping[str, Any],
    folder: Path | None = None,
    name: str = "",
) -> dict[str, Any]:
    """Append one run to a file in `experiments/<experiment>/results/` and return the line's object.

    The file is `full.jsonl` or `quick.jsonl`, or `<name>.jsonl` if a name is given.
    """
    entry = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "quick": quick,
        "machine": machine(),
        "settings": dict(settings),
        "figures": {name: _jsonable(value) for name, value in figures.items()},
    }
    folder = folder or ROOT / "experiments" / experiment / "results"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name or ('quick' if quick else 'full')}.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    return entry


def report(figures: Mapping[str, Any], reaches: Mapping[str, Reach]) -> bool:
    """Print the figures that are to reach something as a table, then all of them as one JSON object on the last line.

    Returns whether every reach is met.
    """
    for name, reach in reaches.items():
        value = figures.get(name)
        shown = "not measured" if value is None else f"{value:.4g}"
        print(f"{name:<20} {shown:>12}   {reach!s:<10} {'met' if reach.met(value) else 'MISSED'}")
    print(json.dumps({name: _jsonable(value) for name, value in figures.items()}), flush=True)
    return all(reach.met(figures.get(name)) for name, reach in reaches.items())


def measure_and_print(
    experiment: str, measure: Callable[[], Mapping[str, float]], *, description: str | None, settings: Mapping[str, Any]
) -> None:
    """The command line of an experiment that compares and has nothing to reach: a line per figure, or `--json`."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{experiment}.run", description=description)
    parser.add_argument("--json", action="store_true", help="print the figures as JSON only")
    add_record_flag(parser)
    args = parser.parse_args()
    figures = measure()
    if args.record:
        record(experiment, figures, quick=False, settings=settings)
    if args.json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}} {value:.4g}")


def _jsonable(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _torch_version() -> str:
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"
