"""Several nodes: what the loss of a worker or of a whole node costs when etcd has its say, and an outage of etcd.

Simulated nodes on this machine, one worker each; the driver kills from outside. What the figures mean is in the README.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.jobs import Script, elastic, finish
from experiments.journals import Follower, Run
from experiments.recovery.figures import Loss, loss_of, step_wall_s, undisturbed_steps
from experiments.recovery.storm import may_strike, usual_step_s

NODES = 3
LOOK_EVERY_S = 0.02
TIMEOUT_S = 1800.0
SETTLE_S = 3.0
"""After the end: how long what is still ending may take."""


@dataclass(kw_only=True)
class Found:
    """What the driver did, beside what the run tells itself."""

    run: Run
    workers_s: dict[str, float] = field(default_factory=dict)
    """Killed member -> when."""
    nodes_s: dict[str, float] = field(default_factory=dict)
    """Member whose whole node was killed -> when."""
    outage: tuple[float, float] | None = None
    leftovers: tuple[str, ...] = ()


def kill_nodes(folder: Path, script: Script, *, steps: int, kills: int, outage_s: float, seed: int) -> Found:
    """An outage of etcd, then up to `kills` kills, a worker and a whole node in turn. Raises RuntimeError."""
    follower, chance = Follower(folder), random.Random(seed)
    found = Found(run=follower.run)
    temporary = folder.with_name(folder.name + "-tmp")
    temporary.mkdir(parents=True)
    segments = _segments()
    options = ("--max-restarts", str(kills + 1))
    with elastic(folder, script, members=NODES, nodes=NODES, options=options, temporary=temporary) as process:
        deadline_s = time.monotonic() + TIMEOUT_S
        while process.poll() is None and time.monotonic() < deadline_s:
            run = follower.look()
            if may_strike(run, (*found.workers_s, *found.nodes_s), members=NODES, steps=steps):
                if found.outage is None:
                    found.outage = _stop_etcd(folder, follower, outage_s)
                elif len(found.workers_s) + len(found.nodes_s) < kills:
                    _strike(found, process, chance)
            time.sleep(LOOK_EVERY_S)
        finish(process, folder, timeout_s=1.0)
    follower.look()
    found.leftovers = _leftovers(folder, found.run, temporary, segments)
    return found


def _stop_etcd(folder: Path, follower: Follower, outage_s: float) -> tuple[float, float]:
    pid = _etcd(folder)
    begun_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    try:
        while time.monotonic() < begun_s + outage_s:
            follower.look()
            time.sleep(LOOK_EVERY_S)
    finally:
        os.kill(pid, signal.SIGCONT)
    return begun_s, time.monotonic()


def _etcd(folder: Path) -> int:
    data = str(folder / "etcd" / "data").encode()
    return next(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if data in _bytes(path))


def _strike(found: Found, process: subprocess.Popen[bytes], chance: random.Random) -> None:
    """A worker and a whole node in turn, at a random point of a step."""
    run = found.run
    victim = chance.choice(run.views[-1].members)
    time.sleep(chance.uniform(0.0, usual_step_s(run)))
    if process.poll() is not None:
        return
    killed = found.workers_s if len(found.workers_s) <= len(found.nodes_s) else found.nodes_s
    killed[victim] = time.monotonic()
    if killed is found.nodes_s:
        os.kill(run.agents[run.nodes[victim]], signal.SIGKILL)
    os.killpg(run.pids[victim], signal.SIGKILL)


# ------------------------------------------------------------------------------------------------------------- figures


def losses_of(found: Found, killed_s: dict[str, float], *, runs: int) -> list[Loss]:
    return [loss_of(found.run, member, at_s, runs=runs) for member, at_s in killed_s.items()]


def outage_delay_s(found: Found) -> float | None:
    """The longest step that lay wholly inside the outage, less the median undisturbed one outside of it."""
    if found.outage is None:
        return None
    begun_s, ended_s = found.outage
    inside: list[float] = []
    outside: list[float] = []
    for view in found.run.views:
        members = [found.run.members[name] for name in view.members]
        if len(members) < NODES:
            continue
        for step in undisturbed_steps(found.run, view):
            wall_s = step_wall_s(members, step)
            ends_s = max(member.advanced_s[step] for member in members)
            if wall_s is not None:
                (inside if begun_s <= ends_s - wall_s and ends_s <= ended_s else outside).append(wall_s)
    return max(inside) - statistics.median(outside) if inside and outside else None


def show(losses: Sequence[Loss], what: str) -> None:
    """A line per kill, in milliseconds."""
    for loss in losses:
        print(
            f"{what:<8}{loss.member:<6}step {loss.step:>3}   detect {loss.detect_s * 1e3:6.1f}   "
            f"recover {loss.comm_recovery_s * 1e3:6.1f}   standstill {loss.standstill_s * 1e3:6.1f}   (ms)"
        )


def middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def figures(found: Found, *, runs: int) -> dict[str, Any]:
    """Medians, the worst beside them. Recovery is that of both kinds of kills: both go through etcd."""
    workers, nodes = (losses_of(found, killed, runs=runs) for killed in (found.workers_s, found.nodes_s))
    show(workers, "worker")
    show(nodes, "node")
    recoveries = [loss.comm_recovery_s for loss in (*workers, *nodes)]
    return {
        "worker_kills": len(workers),
        "node_kills": len(nodes),
        "comm_recovery_s": middle(recoveries),
        "comm_recovery_worst_s": max(recoveries, default=None),
        "standstill_s": middle([loss.standstill_s for loss in workers]),
        "standstill_worst_s": max([loss.standstill_s for loss in workers], default=None),
        "node_standstill_s": middle([loss.standstill_s for loss in nodes]),
        "node_standstill_worst_s": max([loss.standstill_s for loss in nodes], default=None),
        "etcd_outage_delay_s": outage_delay_s(found),
        "leftovers": len(found.leftovers),
    }


# ----------------------------------------------------------------------------------------------------------- leftovers


def _leftovers(folder: Path, run: Run, temporary: Path, segments: set[str]) -> tuple[str, ...]:
    """Processes, sockets, files and shared memory (beside the `segments` of before) that outlive the job, once what is
    ending has had its time.
    """
    deadline_s = time.monotonic() + SETTLE_S
    while (left := _processes(folder, run)) and time.monotonic() < deadline_s:
        time.sleep(LOOK_EVERY_S)
    names = ("control.sock", "secret", "etcd")
    files = [str(path) for path in folder.rglob("*") if path.name in names]
    # Torch's own cache, made by any script that uses its optimizers, with or without elastrain.
    files += [str(path) for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    files += [f"shared memory {name}" for name in _segments() - segments]
    for path in left + files:
        print(f"left behind: {path}")
    return tuple(left + files)


def _segments() -> set[str]:
    """Shared memory that has a name. Ours has none."""
    return set(os.listdir("/dev/shm"))


def _processes(folder: Path, run: Run) -> list[str]:
    """Whose session is one of the job's, or whose command names its folder."""
    sessions = {*run.pids.values(), *run.agents.values()}
    left = []
    for place in Path("/proc").glob("[0-9]*"):
        fields = _bytes(place / "stat").rpartition(b")")[2].split()
        if (
            fields
            and fields[0] != b"Z"
            and (int(fields[3]) in sessions or str(folder).encode() in _bytes(place / "cmdline"))
        ):
            left.append(f"process {place.name}")
    return left


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has just ended
        return b""
