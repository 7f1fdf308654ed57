"""Simulate whole jobs under seeded faults, count those in which anything is wrong, and look for the planted bugs."""

from __future__ import annotations

import argparse
import multiprocessing as mp
import sys
import time
from collections import Counter
from collections.abc import Iterable

from experiments.harness import Reach, record, report
from tests.sim.plants import PLANTS
from tests.sim.scenarios import cluster_of
from tests.sim.test_planted_bugs import first_finding

PIECE = 50
"""Schedules between two looks at the clock."""


def simulate(first: int) -> tuple[Counter[str], list[str]]:
    """How `PIECE` schedules ended, and a sentence for each that broke an invariant."""
    ended: Counter[str] = Counter()
    broken: list[str] = []
    for seed in range(first, first + PIECE):
        cluster = cluster_of(seed)
        try:
            cluster.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            broken.append(f"seed {seed}: {type(error).__name__}: {error}")
        else:
            ended[cluster.outcome] += 1
        ended["schedules"] += 1
        ended["faults"] += cluster.struck
    return ended, broken


def hunt(pieces: Iterable[tuple[Counter[str], list[str]]], until_s: float) -> tuple[Counter[str], list[str]]:
    ended: Counter[str] = Counter()
    broken: list[str] = []
    for some, found in pieces:
        ended += some
        broken += found
        for sentence in found:
            print(f"{sentence}\n  again: python -m tests.sim.replay {sentence.split(':')[0].split()[1]}", flush=True)
        if ended["schedules"] % 1000 == 0:
            print(f"{ended['schedules']} schedules, {len(broken)} violations", flush=True)
        if time.monotonic() > until_s:
            break
    return ended, broken


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.simulation.run", description=__doc__)
    parser.add_argument("--schedules", type=int, default=20_000, help=f"a multiple of {PIECE}")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--minutes", type=float, default=60.0, help="no new schedules when they are over")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-plants", action="store_true", help="leave the planted bugs out")
    parser.add_argument("--record", action="store_true", help="append the figures to the results")
    args = parser.parse_args()
    begun_s = time.monotonic()
    seeds = range(args.first, args.first + args.schedules, PIECE)
    with mp.get_context("spawn").Pool(args.processes) as pool:
        pieces = pool.imap_unordered(simulate, seeds)
        ended, broken = hunt(pieces, begun_s + 60 * args.minutes)
        plants = [] if args.no_plants else sorted(PLANTS)
        pool.terminate()
    with mp.get_context("spawn").Pool(args.processes) as pool:
        found = dict(zip(plants, pool.map(first_finding, plants, chunksize=1), strict=True))
    missed = [name for name in plants if found[name] is None]
    figures = {
        "schedules": ended["schedules"],
        "faults": ended["faults"],
        "violations": len(broken),
        "ended_lost": ended["lost"],
        "ended_diverged": ended["diverged"],
        "planted": len(plants),
        "planted_missed": len(missed),
        "planted_found": len(plants) - len(missed),
        "wall_s": round(time.monotonic() - begun_s, 1),
    }
    if args.record:
        settings = {"first": args.first, "asked": args.schedules, "processes": args.processes, "missed": missed}
        record("simulation", figures, quick=ended["schedules"] < 20_000, settings=settings)
    return 0 if report(figures, {"violations": Reach(limit=0), "planted_missed": Reach(limit=0)}) else 1


if __name__ == "__main__":
    sys.exit(main())
