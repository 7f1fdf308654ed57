"""Three hosts; the cable of one is cut without a word to anybody. How long do the others stand still?

Hosts are network namespaces, each with an `elastrain run` of its own and TCP to the others; timeouts are the defaults.
When the others have gone on, the cable is mended, and the host comes back with a new member: then it is cut again.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastrain.launcher.namespaces.switch import Switch, lacking
from experiments.hosts import ETCD, cut, hosts_with_etcd, mend
from experiments.jobs import Script, elastic, finish
from experiments.journals import Follower, Member
from experiments.recovery.figures import longest_gap_s, spans_of

HOSTS = ("a", "b", "c")
STEPS_LEFT_MIN = 4
TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.05


class Hosts:
    """A job of three hosts, one worker each, seen from `a` and `b`."""

    def __init__(self, folder: Path, script: Script, switch: Switch, open_: ExitStack) -> None:
        self._folder = folder
        self._followers = {host: Follower(folder / host) for host in HOSTS}
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        for host in HOSTS:
            options = ("--nnodes", "2:3", "--rdzv-endpoint", ETCD, "--rdzv-id", "blackhole", "--node-name", host)
            options += ("--secret-file", str(folder / "secret"), "--last-call", "30")
            job = elastic(folder / host, script, members=1, options=options, inside=switch.inside(host))
            self.jobs[host] = open_.enter_context(job)

    def members(self, *hosts: str) -> list[Member]:
        return [member for host in hosts for member in self._followers[host].look().members.values()]

    def has_gone_on(self, members: int) -> bool:
        """The view has so many, and `a` and `b` have ended two steps in it."""
        run = self._followers["a"].look()
        if not run.views or len(run.views[-1].members) != members:
            return False
        ends = [sorted(m.advanced_s.values())[-2:] for m in self.members("a", "b")]
        return all(len(last) == 2 and last[0] > run.views[-1].at_s for last in ends)

    def newest_step(self) -> int:
        return max((max(member.advanced_s, default=0) for member in self.members("a", "b")), default=0)

    def wait(self, condition: Callable[[], bool], what: str) -> bool:
        """False if the job has ended before. Raises RuntimeError if that takes longer than TIMEOUT_S."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not condition():
            if self.jobs["a"].poll() is not None:
                return False
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"the hosts have not {what} within {TIMEOUT_S:g} s: see the logs in {self._folder}")
            time.sleep(_LOOK_EVERY_S)
        return True


def measured(folder: Path, script: Script, *, steps: int, cuts: int) -> dict[str, Any]:
    """`blackhole_standstill_s` (the median of up to `cuts`) and the digests of all hosts; None, with the reason, where
    it cannot be run."""
    if (reason := lacking()) is not None:
        return {"blackhole_standstill_s": None, "blackhole_reason": reason}
    folder.mkdir(parents=True)
    found: list[float] = []
    with ExitStack() as stack:
        switch = stack.enter_context(hosts_with_etcd(folder, HOSTS))
        hosts = Hosts(folder, script, switch, stack)
        while len(found) < cuts and hosts.wait(lambda: hosts.has_gone_on(3), "come together"):
            if hosts.newest_step() + STEPS_LEFT_MIN > steps:
                break
            cut_s = time.monotonic()
            cut(switch, "c")
            gone_on = hosts.wait(lambda: hosts.has_gone_on(2), "gone on without the third")
            spans = spans_of(hosts.members("a", "b"))
            found.append(longest_gap_s(spans, cut_s, max(ended_s for _, ended_s in spans)))
            mend(switch)
            if not gone_on:
                break
        for host in HOSTS:
            finish(hosts.jobs[host], folder / host, timeout_s=TIMEOUT_S)
        ends = [member.digest for member in hosts.members(*HOSTS) if member.digest is not None]
    return {
        "blackhole_cuts": len(found),
        "blackhole_standstill_s": statistics.median(found) if found else None,
        "blackhole_standstill_worst_s": max(found, default=None),
        "blackhole_digests": sorted(set(ends)),
    }
