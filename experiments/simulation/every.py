"""Every schedule of a very small job, breadth first: JSON on the last line. See README.md."""

from __future__ import annotations

import argparse
import json
import sys

from experiments.harness import record
from tests.sim.cluster import Scenario
from tests.sim.exhaustive import explore

SETTINGS = ("members", "runs", "faults", "backups", "at_once", "all_orders", "limit")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.simulation.every", description=__doc__)
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--runs", type=int, default=2, help="of the one step")
    parser.add_argument("--faults", type=int, default=1, help="members that die")
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--at-once", action="store_true", help="nothing happens between two parts of a computation")
    parser.add_argument("--all-orders", action="store_true", help="also those of schedules that come to the same")
    parser.add_argument("--limit", type=int, default=10**9, help="states")
    parser.add_argument("--record", action="store_true", help="append the figures to the results")
    args = parser.parse_args()
    scenario = Scenario(
        members=args.members, runs=args.runs, crashes=args.faults, backups=args.backups, steps=1, small=True
    )
    found = explore(
        scenario,
        limit=args.limit,
        at_once=args.at_once,
        reduced=not args.all_orders,
        tell=lambda line: print(line, file=sys.stderr, flush=True),
    )
    figures = {**found.__dict__, "schedule": " / ".join(found.schedule)}
    if args.record:
        settings = {"what": "every schedule"} | {key: vars(args)[key] for key in SETTINGS}
        record("simulation", figures, quick=not found.is_whole, settings=settings)
    print(json.dumps(figures))
    return 1 if found.violation or found.leads_back or found.minded else 0


if __name__ == "__main__":
    sys.exit(main())
