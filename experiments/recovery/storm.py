"""One long job of which a member is killed again and again, each time at a random point of a step.

The driver strikes from outside, with SIGKILL to the process; nothing in the job knows of it beforehand.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from experiments.jobs import Script, elastic, finish
from experiments.journals import Follower, Run
from experiments.recovery.figures import undisturbed_steps

LOOK_EVERY_S = 0.05
TIMEOUT_S = 3600.0
STEPS_LEFT_MIN = 4
"""No kill in the last steps: there would be no undisturbed successor."""


@dataclass(kw_only=True)
class Storm:
    """What the driver did, beside what the run tells itself."""

    run: Run
    killed_s: dict[str, float] = field(default_factory=dict)
    """Member -> when it was struck."""
    warm_up_cpu_s: dict[str, float] = field(default_factory=dict)
    """Newcomer -> processor time until its first micro-batch, as seen at the last look before it."""


def storm(folder: Path, script: Script, *, members: int, steps: int, kills: int, seed: int) -> Storm:
    """Train `steps` steps with up to `kills` kills. Raises RuntimeError if the job does not end well."""
    follower, chance = Follower(folder), random.Random(seed)
    found = Storm(run=follower.run)
    options = ("--max-restarts", str(kills + 1))
    with elastic(folder, script, members=members, options=options) as process:
        deadline_s = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            run = follower.look()
            _account(found)
            if len(found.killed_s) < kills and may_strike(run, found.killed_s, members=members, steps=steps):
                _strike(found, process, chance)
            time.sleep(LOOK_EVERY_S)
        finish(process, folder, timeout_s=1.0)
    follower.look()
    return found


def may_strike(run: Run, struck: Collection[str], *, members: int, steps: int) -> bool:
    """All are there, none of whom was struck before (their loss is not known yet), and one undisturbed step of theirs
    has passed.
    """
    if not run.views or len(run.views[-1].members) < members or not set(struck).isdisjoint(run.views[-1].members):
        return False
    done = undisturbed_steps(run, run.views[-1])
    return bool(done) and done[-1] + STEPS_LEFT_MIN < steps


def _strike(found: Storm, process: subprocess.Popen[bytes], chance: random.Random) -> None:
    run = found.run
    victim = chance.choice(run.views[-1].members)
    time.sleep(chance.uniform(0.0, usual_step_s(run)))
    if process.poll() is None:
        found.killed_s[victim] = time.monotonic()
        os.kill(run.pids[victim], signal.SIGKILL)


def usual_step_s(run: Run) -> float:
    """The median time between two ends of steps, over all members of the last view."""
    found = []
    for name in run.views[-1].members:
        ends = sorted(run.members[name].advanced_s.values())
        found += [later - earlier for earlier, later in pairwise(ends)]
    return statistics.median(found) if found else 0.0


def _account(found: Storm) -> None:
    for newcomer in found.run.replaces:
        if newcomer not in found.run.deaths_s and not found.run.members[newcomer].micro_batches:
            found.warm_up_cpu_s[newcomer] = cpu_s(found.run.pids[newcomer])


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, its ended children not included; 0.0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
