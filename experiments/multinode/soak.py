"""Three hosts with their own quorum for an hour: is the job right to the end, and does nothing grow?

`python -m experiments.multinode.soak [--minutes N] [--record]`. The README has the keys.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

from elastrain.errors import ElastrainError
from elastrain.launcher.namespaces.switch import lacking
from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, finish, unwind_on_sigterm
from experiments.journals import Follower, Tail
from experiments.journals import Run as ToldRun
from experiments.multinode.quorum import HOSTS, WAIT_S
from experiments.soak.figures import Sample, figures
from experiments.soak.looking import look
from tests.support.nodes_harness import NodesJob
from tests.support.quorum_harness import QuorumHosts, quorum_hosts
from tests.support.training import SCRIPT, Run

STRIKE_EVERY_S = 20.0
STRIKES_IN_A_TURN = 15
"""One of so many strikes is the loss of an etcd member, so that one is lost every five minutes."""
SAMPLE_EVERY_S, LOOK_EVERY_S = 10.0, 0.5
STILL_S, END_S = 240.0, 900.0
STEPS_PER_MINUTE, LAST_STEPS = 15, 40
"""The script's own waits allow no more steps in a minute. The last ones come when nothing is struck any more."""
OPTIONS = ("--nnodes", "2:3", "--last-call", "60", "--max-restarts", "1000000")
REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "samples_equal": Reach(limit=1, at_least=True),
    "hangs": Reach(limit=0),
    "grown": Reach(limit=0),
    "leftovers": Reach(limit=0),
}


class Strike(StrEnum):
    """A disturbance. The successor of a lost worker joins by itself, and so does that of an etcd member."""

    WORKER = "worker"
    ETCD = "etcd member"
    HOST = "host"
    """All processes of a host, its etcd member among them."""
    START = "start"
    """The lost host's node is started again, and joins."""


def strike_of(number: int) -> tuple[Strike, str]:
    """Return the strike with this number, counted from 0, and its host."""
    turn, place = divmod(number, STRIKES_IN_A_TURN)
    if place < STRIKES_IN_A_TURN - 2:
        return Strike.WORKER, HOSTS[number % len(HOSTS)]
    host = HOSTS[turn % len(HOSTS)]
    if turn % 2:
        return (Strike.HOST if place == STRIKES_IN_A_TURN - 2 else Strike.START), host
    return (Strike.ETCD, host) if place == STRIKES_IN_A_TURN - 2 else (Strike.WORKER, host)


def changes_of(views: Mapping[int, tuple[str, ...]]) -> tuple[int, int]:
    """Count the members that were lost and that joined. `views`: generation -> members."""
    ordered = [set(views[generation]) for generation in sorted(views)]
    pairs = list(pairwise(ordered))
    return sum(len(old - new) for old, new in pairs), sum(len(new - old) for old, new in pairs)


class SoakedHost:
    """One host: its present node, and what this has told so far."""

    def __init__(self, job: NodesJob) -> None:
        self.job = job
        self._follower, self._events = Follower(job.run.path), Tail(job.run.events)
        self.quorum = ""

    @property
    def run(self) -> ToldRun:
        """Contents of the node's log and its members' journals ."""
        return self._follower.run

    @property
    def lives(self) -> bool:
        """True until the node's command has ended."""
        return self.job.process.poll() is None

    @property
    def step(self) -> int:
        """Newest committed step of its members, or -1."""
        return max((member.passed[-1].step for member in self.run.members.values() if member.passed), default=-1)

    def look(self) -> None:
        """Read what is new in the node's log and in its members' journals."""
        self._follower.look()
        for line in self._events.read():
            if line["event"] == "quorum":
                self.quorum = str(line["reason"])

    def workers(self) -> list[int]:
        """Processes of the living workers, the newest last."""
        return [pid for member, pid in self.run.pids.items() if member not in self.run.deaths_s]


@dataclass(kw_only=True)
class Soak:
    """The job under way, and what was seen of it."""

    hosts: QuorumHosts
    arguments: tuple[str, ...]
    nodes: dict[str, SoakedHost] = field(default_factory=dict)
    views: dict[int, tuple[str, ...]] = field(default_factory=dict)
    struck: list[Strike] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    late_s: float = 0.0
    """The longest that a strike waited for the job to be whole."""
    hang: str = ""

    def start(self, host: str) -> None:
        """Start the host's node."""
        self.nodes[host] = SoakedHost(self.hosts.start(host, *OPTIONS, arguments=self.arguments))

    def look(self) -> int:
        """Read what all nodes have told. Returns the newest step."""
        for node in self.nodes.values():
            node.look()
            self.views |= {view.generation: view.members for view in node.run.views}
        return max(node.step for node in self.nodes.values())

    def is_whole(self) -> bool:
        """Return True if every living host has a member and a voting etcd member, and every shard has its copies."""
        living = [node for node in self.nodes.values() if node.lives]
        if not self.views or len(self.views[max(self.views)]) != len(living):
            return False
        try:
            told = living[0].job.status()
        except (ElastrainError, OSError):
            return False
        copied = told["redundancy"].startswith("every shard survives") and "copying" not in told["redundancy"]
        voting = all(node.quorum.startswith(f"{_WORDS[len(living)]} etcd") for node in living)
        return copied and voting and all(self.hosts.etcd(host) for host in HOSTS if self.nodes[host].lives)

    def strike(self, strike: Strike, host: str) -> None:
        """Disturb the job."""
        node = self.nodes[host]
        match strike:
            case Strike.WORKER:
                os.kill(node.workers()[-1], signal.SIGKILL)
            case Strike.ETCD:
                os.kill(self.hosts.etcd(host) or 0, signal.SIGKILL)
            case Strike.HOST:
                self.hosts.lose(host)
            case Strike.START:
                self.start(host)
        self.struck.append(strike)

    def sample(self, at_s: float) -> None:
        """Look at what the processes on all hosts use, and the folders of the present nodes."""
        pids = [pid for host in HOSTS for pid in self.hosts.pids(host)]
        workers = {pid for node in self.nodes.values() for pid in node.workers()}
        folders = (*(node.job.run.path for node in self.nodes.values()), self.hosts.folder / "tmp")
        self.samples.append(look(at_s, pids, workers, folders))


_WORDS = {1: "one", 2: "two", 3: "3"}
"""The beginning of the sentence in which a node tells the quorum's size."""


def disturb(soak: Soak, for_s: float) -> None:
    """Strike until the time is over, each time when the job is whole and the strike is due. Ends early if it hangs."""
    began_s = stepped_s = sampled_s = time.monotonic()
    due_s, step = began_s + STRIKE_EVERY_S, -1
    while (now_s := time.monotonic()) < began_s + for_s or Strike.HOST in soak.struck[-1:]:
        newest = soak.look()
        if newest > step:
            step, stepped_s = newest, now_s
        if now_s - stepped_s > STILL_S:
            soak.hang = f"no commit for {now_s - stepped_s:.0f} s after step {step} and {len(soak.struck)} strikes"
            return
        if now_s - sampled_s > SAMPLE_EVERY_S:
            soak.sample(now_s - began_s)
            sampled_s = now_s
        strike, host = strike_of(len(soak.struck))
        if now_s >= due_s and (strike is Strike.START or soak.is_whole()):
            soak.late_s = max(soak.late_s, now_s - due_s)
            soak.strike(strike, host)
            due_s = max(due_s + STRIKE_EVERY_S, now_s + STRIKE_EVERY_S / 2)
        time.sleep(LOOK_EVERY_S)


def measured(folder: Path, *, minutes: float) -> dict[str, Any]:
    """Soak a job for so long, let it end, and compare it with the job of one, which runs beside it."""
    arguments = ("--steps", str(round(minutes * STEPS_PER_MINUTE) + LAST_STEPS), "--backups", "2")
    (folder / "tmp").mkdir()
    os.environ["TMPDIR"] = str(folder / "tmp")
    script = Script(path=SCRIPT, args=arguments[:2])
    with alone(folder / "alone", script) as reference, quorum_hosts(folder, *HOSTS) as hosts:
        soak = Soak(hosts=hosts, arguments=arguments)
        for host in HOSTS:
            soak.start(host)
        soak.nodes[HOSTS[0]].job.wait("view", timeout_s=WAIT_S)
        disturb(soak, minutes * 60)
        if soak.hang:
            return _values(soak) | {"hang": soak.hang, "last_words": soak.nodes[HOSTS[0]].job.text()[-1000:]}
        ends = [node.job.finish(END_S) for node in soak.nodes.values()]
        left = sum(len(hosts.pids(host)) for host in HOSTS) + sum((run.folder / "quorum").exists() for run in ends)
        soak.look()
        finish(reference, folder / "alone", timeout_s=END_S)
    right = Run(0, "", folder / "alone")
    samples = right.fingerprints()
    return _values(soak) | {
        "digest_equal": {digest for run in ends for digest in run.digests.values()} == set(right.digests.values()),
        "samples_equal": all(told == samples[step] for run in ends for step, told in run.fingerprints().items()),
        "exit_codes": [run.exit_code for run in ends],
        "leftovers": left,
    }


def _values(soak: Soak) -> dict[str, Any]:
    lost, joined = changes_of(soak.views)
    return {
        "strikes": {str(strike): soak.struck.count(strike) for strike in Strike},
        "members_lost": lost,
        "members_joined": joined,
        "views": len(soak.views),
        "steps": max(node.step for node in soak.nodes.values()) + 1,
        "latest_strike_s": soak.late_s,
        "hangs": int(bool(soak.hang)),
        **figures(soak.samples),
    }


def main() -> int:
    """Run the experiment, and print its figures. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.multinode.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="time for which the job is disturbed")
    parser.add_argument("--keep", type=Path, help="where the job's folder stays; default: a temporary folder")
    add_record_flag(parser)
    args = parser.parse_args()
    if (reason := lacking()) is not None:
        raise SystemExit(f"no network namespaces can be made here: {reason}")
    unwind_on_sigterm()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="soak-"))
    values = measured(folder, minutes=args.minutes)
    if args.record:
        record("multinode", values, quick=args.minutes < 55, settings={"soak_minutes": args.minutes})
    met = report(values, REACHES)
    if met:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"the job's folder is {folder}", file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
