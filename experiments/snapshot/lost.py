"""How long until a job that lost everything has ended or goes on: `lost_everything_s`.

    python -m experiments.snapshot.lost [--only NUMBER …]

Three simulated nodes of one worker each. Some workers are killed first, and later, while their replacements start, all
that is left; with checkpoints and without.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from experiments.harness import ROOT
from experiments.jobs import Script, elastic, unwind_on_sigterm
from experiments.journals import Follower
from tests.support.killing import processes_of

SCRIPT = ROOT / "tests" / "integration" / "scripts" / "resumed_training.py"
NODES = 3
PATHS = {"PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
BEFORE = 4
"""Steps that every member has made when the first strike falls."""
TIMEOUT_S, SETTLED_S = 600.0, 60.0
STOOD_STILL = "stood still"


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Who is killed when."""

    first: int
    """Workers that are killed first; the others `later_s` afterwards. 0: all at once."""
    later_s: float = 0.0
    whole_nodes: bool = False
    """The second strike takes the nodes' agents, too."""
    writes: bool = True
    """There are checkpoints to go on from."""


ALL = tuple(
    Loss(first=first, later_s=later_s, whole_nodes=whole_nodes, writes=writes)
    for (first, later_s), whole_nodes, writes in product(
        ((0, 0.0), (1, 0.5), (1, 2.0), (2, 0.5), (2, 2.0), (2, 4.0)), (False, True), (True, False)
    )
)
QUICK = (Loss(first=2, later_s=2.0, whole_nodes=True),)


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What became of it."""

    took_s: float
    """From the last strike; infinite where the job stood still."""
    how: str
    """`resumed`: some member committed a step; `ended`: with an exit code other than 0."""


def strike(folder: Path, loss: Loss) -> Settled:
    """One job. Raises RuntimeError where it does not come far enough to be struck."""
    writes = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "1") if loss.writes else ()
    script = Script(path=SCRIPT, args=("--steps", "100000", "--slow", "0.2"))
    with elastic(folder, script, members=NODES, nodes=NODES, options=writes, environment=PATHS) as job:
        follower = Follower(folder)
        _wait_until_it_trains(follower, job, folder, loss)
        victims = list(follower.run.pids)[: loss.first] if loss.first else []
        _kill(follower.run.pids[name] for name in victims)
        time.sleep(loss.later_s)
        left = [name for name in list(follower.run.pids)[:NODES] if name not in victims]
        agents = [follower.run.agents[follower.run.nodes[name]] for name in left] if loss.whole_nodes else []
        _kill([*agents, *(follower.run.pids[name] for name in left)])
        settled = _settled(follower, job, struck_s=time.monotonic())
        if settled.how == STOOD_STILL:
            print(f"what there is of it: {_kept(folder)}", file=sys.stderr, flush=True)
        job.kill()  # nobody asks for its last checkpoint
        _kill(processes_of(folder))
    print(f"{loss}: {settled}", file=sys.stderr, flush=True)
    return settled


def figures(folder: Path, losses: Sequence[Loss] = ALL) -> dict[str, object]:
    """The longest of all, and what each became."""
    found = [strike(folder / str(number), loss) for number, loss in enumerate(losses)]
    return {
        "lost_everything_s": max(each.took_s for each in found),
        "lost_jobs": len(found),
        "lost_resumed": sum(each.how == "resumed" for each in found),
        "lost_ended": sum(each.how == "ended" for each in found),
    }


def _wait_until_it_trains(follower: Follower, job: subprocess.Popen[bytes], folder: Path, loss: Loss) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until_s and job.poll() is None:
        members = follower.look().members.values()
        trains = len(members) == NODES and all(len(member.advanced_s) >= BEFORE for member in members)
        if trains and (not loss.writes or any((folder / "checkpoints").glob("*/manifest.json"))):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the job did not begin: {(folder / 'output.log').read_text(errors='replace')[-2000:]}")


def _settled(follower: Follower, job: subprocess.Popen[bytes], struck_s: float) -> Settled:
    """A step that is committed after the last strike shows that the job goes on."""
    while (now_s := time.monotonic()) - struck_s < SETTLED_S:
        run = follower.look()
        if any(max(member.advanced_s.values(), default=0.0) > struck_s for member in run.members.values()):
            return Settled(took_s=now_s - struck_s, how="resumed")
        if job.poll() is not None:
            return Settled(took_s=now_s - struck_s, how="ended" if job.returncode else "finished")
        time.sleep(0.02)
    return Settled(took_s=float("inf"), how=STOOD_STILL)


def _kept(folder: Path) -> Path:
    """A copy of the journals and of what the processes said, with the stacks of all, which end by it."""
    for pid in processes_of(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGABRT)
            time.sleep(0.2)  # one after the other into one file
    kept = Path(mkdtemp(prefix="elastrain-lost-kept-"))
    special = lambda at, names: [name for name in names if Path(at, name).is_socket()]  # noqa: E731  a word for it
    shutil.copytree(folder, kept, dirs_exist_ok=True, ignore=special)
    return kept


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one job")
    parser.add_argument("--only", type=int, nargs="+", choices=range(len(ALL)), metavar="NUMBER", help="of all jobs")
    args = parser.parse_args()
    unwind_on_sigterm()
    with TemporaryDirectory(prefix="elastrain-lost-") as name:
        chosen = [ALL[number] for number in args.only] if args.only else ALL
        print(json.dumps(figures(Path(name), QUICK if args.quick else chosen)))


if __name__ == "__main__":
    main()
