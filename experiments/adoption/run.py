"""Experiment about what people's scripts keep on the way to elastrain. So far: an evaluation that four members share.

python -m experiments.adoption.run [--quick] [--record]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish, unwind_on_sigterm

MEMBERS, VICTIM, TIMEOUT_S = 4, "m2", 300.0
CORES = min(MEMBERS, len(os.sched_getaffinity(0)))
SCRIPT = Path(__file__).with_name("evaluating.py")
REACHES = {
    "evaluation_speedup": Reach(limit=0.85 * CORES, at_least=True),
    "evaluation_equal": Reach(limit=1, at_least=True),
}


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.adoption.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    add_record_flag(parser)
    options = parser.parse_args()
    unwind_on_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="adoption-"))
    try:
        found = evaluation(folder, rounds=1 if options.quick else 5)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.record:
        record("adoption", found, quick=options.quick, settings={"members": MEMBERS})
    sys.exit(0 if report(found, REACHES) else 1)


if __name__ == "__main__":
    main()
