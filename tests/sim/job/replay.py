"""Play one schedule and print its transcript: `python -m tests.sim.job.replay SEED|SCHEDULE [--shrink]`.

SCHEDULE is the value that a failing seed prints when it is shrunk. Exit code 1: something does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from tests.sim.job.disk_schedules import draw_disks
from tests.sim.job.isolation_schedules import draw_isolations
from tests.sim.job.schedule import Schedule, draw, draw_lives, from_text, to_text
from tests.sim.job.shrink import failure_of, shrink
from tests.sim.job.straggler_schedules import draw_stragglers
from tests.sim.job.world import World, outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.job.replay", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("schedule", help="a seed, or a schedule as it was printed")
    parser.add_argument("--shrink", action="store_true", help="look for a smaller schedule that breaks the same")
    parser.add_argument("--lives", action="store_true", help="the seed is of a job that loses everything")
    parser.add_argument("--disks", action="store_true", help="likewise, with checkpoints on nodes' own disks")
    parser.add_argument("--stragglers", action="store_true", help="likewise, of a job whose members are slow for long")
    parser.add_argument("--isolations", action="store_true", help="likewise, of a job whose nodes are out of reach")
    options = parser.parse_args(arguments)
    given, drawn = options.schedule, drawn_by(options)
    schedule = from_text(given) if given.startswith("{") else drawn(int(given))
    return play(shrunk(schedule) if options.shrink else schedule)


def drawn_by(options: argparse.Namespace) -> Callable[[int], Schedule]:
    """What draws the schedule of a seed."""
    kinds = {"disks": draw_disks, "lives": draw_lives, "stragglers": draw_stragglers, "isolations": draw_isolations}
    return next((drawn for kind, drawn in kinds.items() if getattr(options, kind)), draw)


def shrunk(schedule: Schedule) -> Schedule:
    """The smallest schedule found in which the same kind of thing goes wrong."""
    words = kind_of(failure_of(schedule))
    return shrink(schedule, lambda smaller: bool(words) and kind_of(failure_of(smaller)) == words)


def kind_of(failure: str) -> str:
    """A failure without names and numbers."""
    return " ".join(word for word in failure.split()[:14] if word.isalpha())


def play(schedule: Schedule) -> int:
    _print(to_text(schedule))
    world = World(schedule, _print)
    try:
        world.run()
    except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
        _print(f"VIOLATION after {world.clock.now:.4f} s: {type(error).__name__}: {error}")
        return 1
    _print(f"# {world.over or outcome(world)}")
    return 0


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names have another order with another seed
        os.execve(
            sys.executable,
            [sys.executable, "-m", "tests.sim.job.replay", *sys.argv[1:]],
            {**os.environ, "PYTHONHASHSEED": "0"},
        )
    sys.exit(main())
