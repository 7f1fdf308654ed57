"""Jobs that are killed whole at random moments and resumed on other numbers of members and nodes: the same bits?"""

from __future__ import annotations

import random
import re
from pathlib import Path

from tests.support.killing import killed, size_options
from tests.support.training import SCRIPTS, run_job

SCRIPT = SCRIPTS / "resumed_training.py"
STEPS = ("--steps", "9")
SIZES = ((1, 0), (2, 0), (3, 0), (5, 0), (1, 2), (1, 3))
"""(workers per node, simulated nodes; 0: one node)."""
_LAST_WORDS = re.compile(r"digest \w+ told \S+ lr \S+")


def figures(folder: Path, *, rounds: int, kills: int, seed: int = 0) -> dict[str, float]:
    """`resume_digest_equal` is 1 if each round ended as the undisturbed job did, in parameters, running statistics,
    a registered model and the schedule. Each round is killed so many times.
    """
    alone = run_job(_made(folder / "alone"), workers=1, arguments=STEPS, script=SCRIPT)
    whole = set(_LAST_WORDS.findall(alone.output))
    assert alone.exit_code == 0 and len(whole) == 1, alone.output
    rng = random.Random(seed)
    # The last life of the rounds in turn has each of the sizes; those that are killed are drawn.
    sizes = [SIZES[number % len(SIZES)] for number in range(rounds)]
    equal = sum(_round(folder / str(number), kills, rng, size) == whole for number, size in enumerate(sizes))
    return {"resume_digest_equal": float(equal == rounds), "resume_rounds": rounds, "resume_kills": rounds * kills}


def _round(folder: Path, kills: int, rng: random.Random, size: tuple[int, int]) -> set[str]:
    """What all members of its last life say in the end."""
    checkpoints = folder / "checkpoints"
    for number in range(kills):
        script = (str(SCRIPT), *STEPS, "--slow", "0.2")
        killed(folder / f"killed{number}", checkpoints, size_options(*rng.choice(SIZES)), script, rng.uniform(0, 0.6))
    workers, nodes = size
    options = ("--checkpoint-dir", str(checkpoints), *size_options(workers, nodes))
    done = run_job(_made(folder / "last"), workers=workers, arguments=STEPS, options=options, script=SCRIPT)
    went_on = done.exit_code == 0 and "the job goes on after step" in done.output
    return set(_LAST_WORDS.findall(done.output)) if went_on else set()


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder
