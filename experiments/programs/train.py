"""The training script: `train.py NAME plain|job|within|save`. Says figures and digests of the end, a line each."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from elastrain.errors import ElastrainError
from elastrain.offload.errors import OffloadError
from experiments.programs import kinds as kinds
from experiments.programs import worlds
from experiments.programs.holding import read_hold
from experiments.programs.program import PROGRAMS, Program

STACKS_AFTER = "PROGRAMS_STACKS_AFTER_S"


def main() -> None:
    name, world = sys.argv[1:3]
    faulthandler.dump_traceback_later(float(os.environ.get(STACKS_AFTER, "600")))
    torch.set_num_threads(1)
    make = PROGRAMS[name]
    if world == "job":
        program = worlds.in_a_job(make, read_hold())
        say(f"SAYS {json.dumps(dict(program.says()))}")
        say(f"DIGEST {program.job.digest()} {worlds.digest(program, states=False)}")
        return
    loops = {"plain": worlds.plain, "within": worlds.within, "save": worlds.save}
    try:
        for way, trained in loops[world](make):
            tell(way, trained)
    except (ElastrainError, OffloadError) as error:
        sys.exit(f"elastrain: {error}")


def tell(way: str, program: Program) -> None:
    """Say figures to the last bit, and the digest."""
    say(f"SAYS {json.dumps(dict(program.says()))}")
    say(f"BITS {worlds.digest(program, states=True)} {way}")


def say(line: str) -> None:
    """Write in one call: lines of several members would lie within one another."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
