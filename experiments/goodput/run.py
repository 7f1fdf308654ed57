"""How much of the work of living members is kept under repeated kills? One schedule for elastrain and two peers.

`python -m experiments.goodput.run [--quick] [--every S …] [--kills N] [--only SYSTEM …] [--record]`. See README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.goodput import figures
from experiments.goodput.course import Course
from experiments.goodput.systems import SYSTEMS, Setting, logs
from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from experiments.plots import lines

PEERS = ("torchrun", "torchft")
GOODPUT = {60: Reach(limit=0.95, at_least=True), 15: Reach(limit=0.85, at_least=True)}
TIMES_BETTER = Reach(limit=1.5, at_least=True)
RESULTS = ROOT / "experiments" / "goodput" / "results"


def measured(folder: Path, name: str, setting: Setting, *, every_s: float, kills: int, seed: int) -> dict[str, Any]:
    """One system under the schedule; its figures, or why there are none."""
    strikes = figures.schedule(seed=seed, every_s=every_s, count=kills, places=setting.members)
    try:
        with SYSTEMS[name](folder, setting) as system:
            course = Course(system=system, members=setting.members)
            course.run(strikes, every_s)
            return course_figures(course) | dict(system.amiss()) | {"course": course}
    except (RuntimeError, ValueError) as error:
        print(f"{name}: {error}\n{logs(folder)}", file=sys.stderr)
        return {"reason": str(error)[-500:]}


def course_figures(course: Course) -> dict[str, Any]:
    """Goodput and what it is made of. Raises ValueError if the job did not come to its end."""
    where = course.window
    if where is None:
        raise ValueError("expected a commit after the schedule")
    absences, training, places = course.absences, course.absences_until_they_train, course.members
    return {
        "goodput": figures.goodput(course.commits, absences, where, places=places, step_s=course.step_s),
        "goodput_of_trained": figures.goodput(course.commits, training, where, places=places, step_s=course.step_s),
        "kills": len(course.killed_s),
        "steps": figures.steps_inside(course.commits, where),
        "step_s": course.step_s,
        "window_s": where.length_s,
        "alive_s": figures.alive_s(absences, where, places=places),
        "absences_s": [round(min(each.until_s, where.until_s) - each.from_s, 3) for each in absences],
        "until_they_train_s": [round(min(each.until_s, where.until_s) - each.from_s, 3) for each in training],
        "killed_after_s": sorted(round(at_s - where.from_s, 2) for _, at_s in course.killed_s.values()),
        "commits_after_s": [round(each.at_s - where.from_s, 2) for each in figures.progress(course.commits)],
    }


def named(found: Mapping[str, Mapping[str, Any]], every_s: int) -> dict[str, Any]:
    """The figures of all systems at one rate, in one flat table."""
    ours = found.get("elastrain", {})
    values: dict[str, Any] = {f"goodput_{every_s}": ours.get("goodput")}
    values[f"goodput_of_trained_{every_s}"] = ours.get("goodput_of_trained")
    for peer in PEERS:
        values[f"goodput_{peer}_{every_s}"] = found.get(peer, {}).get("goodput")
        values[f"goodput_of_trained_{peer}_{every_s}"] = found.get(peer, {}).get("goodput_of_trained")
    best = max([each["goodput"] for peer, each in found.items() if peer in PEERS and "goodput" in each], default=None)
    if best is not None and "goodput" in ours:
        values[f"times_better_{every_s}"] = ours["goodput"] / best
    for name, each in found.items():
        values[f"of_{name}_{every_s}"] = {key: value for key, value in each.items() if key != "course"}
    return values


def plot(path: Path, found: Mapping[str, Mapping[str, Any]], every_s: int) -> None:
    """Steps over time, from the schedule's begin on, each in steps of its own undisturbed length."""
    series = {}
    for name, each in found.items():
        course: Course | None = each.get("course")
        if course is not None and (where := course.window) is not None:
            inside = [c for c in figures.progress(course.commits) if where.from_s <= c.at_s <= where.until_s]
            done = [sum(commit.share for commit in inside[1 : index + 1]) for index in range(len(inside))]
            moments = [commit.at_s - where.from_s for commit in inside]
            series[f"{name} ({each['goodput']:.2f})"] = (moments, [steps * each["step_s"] for steps in done])
    title = f"A member is killed every {every_s} s in the mean"
    lines(path, series, labels=("seconds", "seconds of undisturbed training done"), title=title)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.goodput.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="four kills, 15 s apart, elastrain alone (90 s)")
    parser.add_argument("--every", type=int, nargs="+", help="mean seconds between two kills; default: 60 15")
    parser.add_argument("--kills", type=int, help="of each schedule; default: 6, of --quick 4")
    parser.add_argument("--only", nargs="+", choices=list(SYSTEMS), help="these systems")
    parser.add_argument("--seed", type=int, default=0, help="chooses moments and victims")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    setting, kills = Setting(), args.kills or (4 if args.quick else 6)
    every = args.every or ((15,) if args.quick else tuple(GOODPUT))
    names: Sequence[str] = args.only or (("elastrain",) if args.quick else tuple(SYSTEMS))
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-goodput-") as folder:
        for every_s in every:
            found = {}
            for name in names:
                place = Path(folder) / f"{name}-{every_s}"
                found[name] = measured(place, name, setting, every_s=every_s, kills=kills, seed=args.seed)
                print(f"{name}, a kill every {every_s} s: {found[name].get('goodput', 'no figure')}", flush=True)
            values |= named(found, every_s)
            if args.record and not args.quick:
                plot(RESULTS / f"goodput-{every_s}.png", found, every_s)
    settings = asdict(setting) | {"every_s": list(every), "kills": kills, "only": list(names), "seed": args.seed}
    if args.record:
        record("goodput", values, quick=args.quick, settings=settings)
    reaches = {f"goodput_{every_s}": reach for every_s, reach in GOODPUT.items()}
    reaches |= {f"times_better_{every_s}": TIMES_BETTER for every_s in GOODPUT}
    met = report(values, {key: reach for key, reach in reaches.items() if key in values})
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
