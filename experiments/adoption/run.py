"""Experiment about what people's scripts keep on the way to elastrain.

python -m experiments.adoption.run [--quick] [--only PART …] [--record]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments.adoption.five import FIVE, program_figures
from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm

MEMBERS, VICTIM, TIMEOUT_S = 4, "m2", 300.0
CORES = min(MEMBERS, len(os.sched_getaffinity(0)))
SCRIPT = Path(__file__).with_name("evaluating.py")
REACHES = {
    "evaluation_speedup": Reach(limit=0.85 * CORES, at_least=True),
    "evaluation_equal": Reach(limit=1, at_least=True),
    "state_dict_ratio": Reach(limit=1.5),
    "step_slowed": Reach(limit=1.02),
    "micro_batch_slowed": Reach(limit=1.02),
}
SAVING, SAVERS = Path(__file__).with_name("saving.py"), 2
PARTS = ("evaluation", "checkpoint", *(program.name for program in FIVE))


def reaches(parts: Sequence[str]) -> dict[str, Reach]:
    """Return what the figures of some parts have to reach."""
    found = {key: reach for key, reach in REACHES.items() if ("evaluation" if "eval" in key else "checkpoint") in parts}
    for program in FIVE:
        limits = {"changed_lines": program.lines, "log_gaps": 0, "log_repeats": 0, "given_up": 0}
        if program.name in parts:
            found |= {f"{program.name}_{key}": Reach(limit=limit) for key, limit in limits.items()}
            found[f"{program.name}_digest_equal"] = Reach(limit=1, at_least=True)
    return found


def told(output: str) -> tuple[float, set[str], set[str]]:
    """Return the longest time of an evaluation, what members say that it came to, and their digests."""
    lines = re.findall(r"evaluated ([\d.]+) (\{.*?\})", output)
    return max(float(s) for s, _ in lines), {sums for _, sums in lines}, set(re.findall(r"digest (\w+)", output))


def evaluation(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Return the figures of an evaluation by four members, of which one is killed, against one that does all."""
    lone_s, shared_s, is_equal = [], [], True
    for number in range(rounds):
        place = folder / f"alone-{number}"
        with alone(place, Script(path=SCRIPT)) as process:
            took_s, *right = told(finish(process, place, timeout_s=TIMEOUT_S))
        lone_s.append(took_s)
        place = folder / f"shared-{number}"
        script, options = Script(path=SCRIPT, args=("--kill", VICTIM)), ["--max-restarts", "0"]
        with elastic(place, script, members=MEMBERS, options=options) as process:
            output = finish(process, place, timeout_s=TIMEOUT_S)
        took_s, *found = told(output)
        shared_s.append(took_s)
        is_equal = is_equal and found == right and f"{VICTIM} lost" in output
    figures = {"evaluation_alone_s": median(lone_s), "evaluation_shared_s": median(shared_s), "cores": CORES}
    return figures | {
        "evaluation_speedup": median(lone_s) / median(shared_s),
        "evaluation_equal": is_equal,
    }


def checkpoint(folder: Path, *, rounds: int) -> dict[str, Any]:
    """Return the figures of checkpoints that the script writes, against those of plain training.

    The time of a step, and that of a micro-batch, is that on a member that does not save, while the main member saves,
    against all other steps. The step waits for the micro-batches of the main member, the micro-batch for nobody.
    """
    plain_s, saved_s, gathered_s = [], [], []
    slowed = dict[str, list[float]](step=[], micro_batch=[])
    for number in range(rounds):
        place = folder / f"plain-{number}"
        with alone(place, Script(path=SAVING, args=("--plain", "--path", str(place / "file")))) as process:
            output = finish(process, place, timeout_s=TIMEOUT_S)
        plain_s.append(min(float(each) for each in re.findall(r"saved ([\d.]+)", output)))
        place = folder / f"job-{number}"
        with elastic(place, Script(path=SAVING, args=("--path", str(place / "file"))), members=SAVERS) as process:
            output = finish(process, place, timeout_s=TIMEOUT_S)
        saves = re.findall(r"saved ([\d.]+) ([\d.]+)", output)
        saved_s.append(min(float(whole) for whole, _ in saves))
        gathered_s.append(min(float(gathered) for _, gathered in saves))
        for what, ratios in slowed.items():
            word = what.replace("_", "-")
            taken_s = [
                median(float(s) for s in re.findall(rf"{word} ([\d.]+) {kind}", output)) for kind in ("saved", "plain")
            ]
            ratios.append(taken_s[0] / taken_s[1])
    figures = {"plain_save_s": median(plain_s), "job_save_s": median(saved_s), "job_state_dict_s": median(gathered_s)}
    figures |= {f"{what}_slowed": median(ratios) for what, ratios in slowed.items()}
    return figures | {"state_dict_ratio": median(saved_s) / median(plain_s)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.adoption.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    add_record_flag(parser)
    options = parser.parse_args()
    unwind_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="adoption-"))
    try:
        found: dict[str, Any] = {}
        rounds = 1 if options.quick else 5
        for part, measure in (("evaluation", evaluation), ("checkpoint", checkpoint)):
            found |= measure(folder, rounds=rounds) if part in options.only else {}
        for program in FIVE:
            if program.name in options.only:
                told = program_figures(program, folder)
                found |= {f"{program.name}_{key}": value for key, value in told.items()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.record:
        record("adoption", found, quick=options.quick, settings={"members": MEMBERS, "parts": list(options.only)})
    sys.exit(0 if report(found, reaches(options.only)) else 1)


if __name__ == "__main__":
    main()
