"""Simulate whole jobs (members and agents together) under seeded faults, and look for the bugs planted into them.

A schedule that breaks something is shrunk and printed as a value, with its transcript: replay it with
`python -m tests.sim.job.replay VALUE`.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing as mp
import sys
import time
from collections import Counter
from functools import partial

from experiments.harness import Reach, record, report
from tests.sim.job.batch import PIECE, simulate
from tests.sim.job.disk_schedules import draw_disks
from tests.sim.job.isolation_schedules import draw_isolations
from tests.sim.job.plants import PLANTS
from tests.sim.job.replay import drawn_by, shrunk
from tests.sim.job.schedule import Schedule, draw, draw_lives, to_text
from tests.sim.job.straggler_schedules import draw_stragglers

TOLD_EACH = 5_000  # schedules between two lines of progress
WHAT = {
    draw: "whole jobs",
    draw_lives: "lives",
    draw_disks: "lives on own disks",
    draw_stragglers: "stragglers",
    draw_isolations: "isolations",
}
"""What draws them -> what the results call them."""


def find(plant: str) -> tuple[str, int | None]:
    """A seed that shows the planted bug; None where none of those that it may take does."""
    found = PLANTS[plant].search.find()
    return plant, None if found is None else found[0]


def rarely_collect() -> None:
    """In each process: what was imported lives for ever, and a schedule makes little that is cyclic."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def tell(seed: int, sentence: str, schedule: Schedule) -> None:
    """A failure, its seed, and the smallest schedule found that fails alike."""
    print(f"seed {seed}: {sentence}", flush=True)
    print(f"  again: python -m tests.sim.job.replay '{to_text(shrunk(schedule))}'", flush=True)


def tell_progress(
    ended: Counter[str], broken: list[tuple[int, str]], found: list[tuple[int, str]], seconds: float
) -> None:
    """Each failure as it is found, and now and then how far it is, to stderr: shrinking comes at the end."""
    for seed, sentence in found:
        print(f"seed {seed}: {sentence}", file=sys.stderr, flush=True)
    if ended["schedules"] % TOLD_EACH == 0:
        print(f"{ended['schedules']} schedules, {len(broken)} broken, {seconds:.0f} s", file=sys.stderr, flush=True)


def seeds_of(args: argparse.Namespace) -> range:
    """The first seed of each piece."""
    return range(args.first, args.first + args.schedules, PIECE)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.simulation.jobs", description=__doc__)
    parser.add_argument("--schedules", type=int, default=2000, help=f"a multiple of {PIECE}")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--lives", action="store_true", help="jobs that write checkpoints and lose everything")
    parser.add_argument("--disks", action="store_true", help="likewise, with checkpoints on nodes' own disks")
    parser.add_argument("--stragglers", action="store_true", help="longer jobs, in which members are slow for long")
    parser.add_argument("--isolations", action="store_true", help="jobs in which nodes are out of reach for long")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new schedules when they are over")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-plants", action="store_true", help="leave the planted bugs out")
    parser.add_argument("--record", action="store_true", help="append the figures to the results")
    args = parser.parse_args()
    drawn = drawn_by(args)
    begun_s = time.monotonic()
    ended: Counter[str] = Counter()
    broken: list[tuple[int, str]] = []
    with mp.get_context("spawn").Pool(args.processes, rarely_collect) as pool:
        for some, found in pool.imap_unordered(partial(simulate, draw=drawn), seeds_of(args)):
            ended += some
            broken += found
            tell_progress(ended, broken, found, time.monotonic() - begun_s)
            if time.monotonic() > begun_s + 60 * args.minutes:
                break
        wall_s = time.monotonic() - begun_s
        plants = [] if args.no_plants else sorted(PLANTS)
        seeds = dict(pool.imap_unordered(find, plants)) if plants else {}
        pool.terminate()
    for seed, sentence in sorted(broken):
        tell(seed, sentence, drawn(seed))
    missed = [plant for plant, seed in seeds.items() if seed is None]
    figures = {
        "schedules": ended["schedules"],
        "faults": ended["faults"],
        "violations": sum("stands still" not in sentence for _, sentence in broken),
        "stuck": sum("stands still" in sentence for _, sentence in broken),
        "ended_finished": ended["finished"],
        "ended_with_a_sentence": ended["ended"],
        "ended_with_nobody_left": ended["lost"],
        "planted": len(plants),
        "planted_found": len(plants) - len(missed),
        "planted_missed": len(missed),
        "wall_s": round(wall_s, 1),
    }
    if args.record:
        settings = {
            "what": WHAT[drawn],
            "first": args.first,
            "processes": args.processes,
            "missed": missed,
        }
        record("simulation", figures, quick=ended["schedules"] < 20_000, settings=settings)
    none = Reach(limit=0)
    return 0 if report(figures, {"violations": none, "stuck": none, "planted_missed": none}) else 1


if __name__ == "__main__":
    sys.exit(main())
