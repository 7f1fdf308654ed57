"""Print the transcript of one simulated schedule: `python -m tests.sim.replay SEED [--plant NAME]`.

Every line begins with the number of the event. The exit code is 1 where an invariant breaks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from tests.sim.member import Violation
from tests.sim.plants import PLANTS
from tests.sim.scenarios import cluster_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.replay", description=__doc__.splitlines()[0])
    parser.add_argument("seed", type=int)
    parser.add_argument("--plant", choices=sorted(PLANTS), help="with this planted bug")
    options = parser.parse_args(arguments)
    plant = PLANTS[options.plant] if options.plant else None
    cluster = cluster_of(options.seed, plant.cluster) if plant else cluster_of(options.seed)
    cluster.tell = _print
    _print(f"seed {options.seed}: {cluster.scenario}")
    try:
        with plant.patch() if plant else nullcontext():
            cluster.run()
    except Violation as violation:
        _print(f"VIOLATION: {violation}")
        return 1
    _print(f"ended {cluster.outcome}{': ' if cluster.lost or cluster.diverged else ''}{cluster.lost}{cluster.diverged}")
    return 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
