"""Do ordinary programs train as in plain PyTorch, in every way that a job may go? See README.md.

`python -m experiments.programs.run [--only NAME …] [--ways WAY …] [--jobs N] [--quick] [--record]`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from experiments.programs import kinds as kinds
from experiments.programs.program import PROGRAMS
from experiments.programs.verdicts import EQUAL, REFUSED, STUCK, WORST_FIRST, WRONG, Verdict, judge, together
from experiments.programs.ways import WAYS, Ran, Start, run_way
from tests.support import warm

REACHES = {WRONG: Reach(limit=0), STUCK: Reach(limit=0)}
DEADLINE_S = 180.0
"""Of one way. The longest takes ten seconds on a quiet core."""
QUICK = {
    "two_passes": ("one", "2", "kill"),
    "tied_penalty": ("one", "resume"),
    "group_counter": ("one", "2", "resume"),
    "mask_once": ("kill", "resume"),
    "one_cycle": ("3", "kill"),
    "default_dict_batch": ("one",),
    "deep_and_plain": ("stages", "within", "save"),
}
"""The cut for `make test`: a program of each of the main kinds, in the ways that matter to it."""
IMPORTED = ("experiments.programs.kinds", "tests.integration.offload.lifetimes.touching", "experiments.programs.train")
LIBRARY = tuple(
    f"transformers.models.{kind}.modeling_{kind}" for kind in ("albert", "bert", "gpt2", "llama", "t5", "vit")
)
"""What processes of a full run have imported besides."""


def verdicts_of(
    name: str, ways: Sequence[str], folder: Path, *, start: Start, keep: bool = False
) -> dict[str, Verdict]:
    """Run a program in these ways, one after the other. The plain run and the job of one are always made."""
    program, ran, found = PROGRAMS[name], dict[str, Ran](), dict[str, Verdict]()
    for way in [way for way in WAYS if way in {*ways, "plain", "one"} - set(program.without)]:
        ran[way] = run_way(name, way, folder / name / way, deadline_s=DEADLINE_S, start=start)
        verdict = judge(program, way, ran[way], ran)
        if way in ways or verdict.kind != EQUAL:
            found[way] = verdict
        if way == "plain" and verdict.kind != EQUAL:
            break  # the program itself is broken
    if not keep:
        shutil.rmtree(folder / name)
    return found


def figures(found: Mapping[str, Mapping[str, Verdict]], seconds: float) -> dict[str, Any]:
    """Return the keys of the README."""
    kind = {name: together(list(verdicts.values())) for name, verdicts in found.items()}
    listed = {each: sorted(name for name in kind if kind[name] == each) for each in (REFUSED, WRONG, STUCK)}
    return {
        "programs": len(kind),
        **{each: sum(one == each for one in kind.values()) for each in reversed(WORST_FIRST)},
        "neighbours": sum(not PROGRAMS[name].reported for name in kind),
        "ways": sum(map(len, found.values())),
        **{f"{each}_names": names for each, names in listed.items()},
        "without_stages": sorted(
            name for name, ways in found.items() if "stages" in ways and _has_no_cut(ways["stages"])
        ),
        "seconds": round(seconds),
    }


def _has_no_cut(verdict: Verdict) -> bool:
    return verdict.kind == EQUAL and bool(verdict.why)


def tell(name: str, verdicts: Mapping[str, Verdict]) -> None:
    """Print one line per program, and below it what is not equal."""
    which = " ".join(f"{way}={verdict.kind}" for way, verdict in verdicts.items() if verdict.kind != EQUAL)
    lines = [f"{name:<28} {together(list(verdicts.values())):<8} {which}".rstrip()]
    for why in dict.fromkeys(verdict.why for verdict in verdicts.values() if verdict.why):
        ways = {way: verdict.faults for way, verdict in verdicts.items() if verdict.why == why}
        faults = [] if "" in ways.values() else [f"        | {each}" for each in ways.values()]
        lines += [f"    {', '.join(ways)}: " + why.replace("\n", "\n        | "), *faults]
    print("\n".join(lines), flush=True)


def run_all(
    ways: Mapping[str, Sequence[str]], folder: Path, *, jobs: int, start: Start, keep: bool = False
) -> dict[str, dict[str, Verdict]]:
    """Run programs, `jobs` at a time, and tell each when it is done."""
    one = partial(verdicts_of, folder=folder, start=start, keep=keep)
    found: dict[str, dict[str, Verdict]] = {}
    with ThreadPoolExecutor(jobs) as pool:
        for name, verdicts in zip(ways, pool.map(one, ways, ways.values()), strict=True):
            found[name] = verdicts
            tell(name, verdicts)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.programs.run", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(PROGRAMS), metavar="NAME", help="these programs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="these ways")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="programs at a time")
    parser.add_argument("--quick", action="store_true", help="a few programs in a few ways")
    parser.add_argument("--cold", action="store_true", help="start every process cold")
    parser.add_argument("--keep", type=Path, help="where the folders of all runs stay")
    parser.add_argument("--list", action="store_true", help="print the programs and what they are about")
    add_record_flag(parser)
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{name:<28} {(kind.__doc__ or '').splitlines()[0]}" for name, kind in PROGRAMS.items()))
        return 0
    unwind_on_sigterm()
    warm.import_too(IMPORTED if args.quick else (*IMPORTED, *LIBRARY))
    ways = QUICK if args.quick else {name: tuple(args.ways) for name in args.only or PROGRAMS}
    folder = args.keep or Path(tempfile.mkdtemp(prefix="elastrain-programs-"))
    begun_s = time.monotonic()
    start = subprocess.Popen if args.cold else warm.Popen
    found = run_all(ways, folder, jobs=args.jobs, start=start, keep=args.keep is not None)
    values = figures(found, time.monotonic() - begun_s)
    if args.record:
        record("programs", values, quick=args.quick, settings={"ways": args.ways, "jobs": args.jobs})
    if args.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if report(values, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
