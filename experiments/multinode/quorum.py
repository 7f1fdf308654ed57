"""A job of three hosts with its own etcd quorum: its first host is lost and comes back, then its members are killed."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elastrain.launcher.namespaces.switch import lacking
from experiments.journals import read_run
from experiments.recovery.figures import longest_gap_s, spans_of
from tests.support.nodes_harness import NodesJob
from tests.support.quorum_harness import QuorumHosts, quorum_hosts
from tests.support.training import undisturbed
from tests.support.waiting import until

HOSTS = ("h0", "h1", "h2")
WAIT_S = 120.0
VIEW_LOST_S = 60.0
"""A change of the view that has not come after so long is lost."""


@dataclass(kw_only=True)
class Trial:
    """The job under way: the node on each host, and what was measured so far."""

    hosts: QuorumHosts
    arguments: tuple[str, ...]
    jobs: dict[str, NodesJob] = field(default_factory=dict)
    view_s: list[float] = field(default_factory=list)
    lost: int = 0

    def start(self, host: str) -> None:
        options = ("--nnodes", "2:3", "--last-call", "60", "--max-restarts", "200")
        self.jobs[host] = self.hosts.start(host, *options, arguments=self.arguments)

    def generation(self, host: str) -> int:
        return int(self.jobs[host].events("view")[-1]["generation"])

    def wait_whole(self, host: str) -> None:
        """Until the view has a member of every host, every host has an etcd member, and every shard has its backup."""

        def whole() -> bool:
            members = self.jobs[host].events("view")[-1]["members"]
            sizes = self.jobs[host].events("quorum")
            voters = bool(sizes) and sizes[-1]["reason"].startswith("3 etcd")
            return len(members) == len(HOSTS) and voters and all(self.hosts.etcd(each) for each in HOSTS)

        self.jobs[host].wait("view", timeout_s=WAIT_S)
        until(whole, WAIT_S, f"a whole job\n{self.jobs[host].text()}")
        self.jobs[host].wait_copied(WAIT_S)

    def member(self, host: str) -> tuple[str, int]:
        """The newest worker of a host, and its process."""
        started = self.jobs[host].events("worker_start")[-1]
        return str(started["member"]), int(started["pid"])

    def view_without(self, member: str, host: str, after: int) -> float | None:
        """When the first view without the member came, in the log of a host. None if none came."""

        def views() -> list[dict[str, Any]]:
            found = self.jobs[host].events("view")
            return [each for each in found if each["generation"] > after and member not in each["members"]]

        until_s = time.monotonic() + VIEW_LOST_S
        while time.monotonic() < until_s:
            if found := views():
                return float(found[0]["t"])
            time.sleep(0.02)
        return None


def lose_first_host(trial: Trial) -> dict[str, float | None]:
    """Kill all processes of the first host, and start its node again."""
    member, _ = trial.member("h0")
    before, killed_s = trial.generation("h1"), time.monotonic()
    trial.hosts.lose("h0")
    view_s = trial.view_without(member, "h1", before)
    trial.jobs["h1"].wait_copied(WAIT_S)
    runs = [read_run(trial.jobs[host].run.path) for host in ("h1", "h2")]
    spans = spans_of([each for run in runs for each in run.members.values()])
    stall_s = longest_gap_s(spans, killed_s, max(ended_s for _, ended_s in spans))
    started_s = time.monotonic()
    trial.start("h0")

    def joined() -> float:
        found = trial.jobs["h1"].events("view")
        return next((float(each["t"]) for each in found if each["t"] > started_s and len(each["members"]) == 3), 0.0)

    joined_s = until(joined, WAIT_S, "the first host in the view")
    return {
        "first_host_view_s": None if view_s is None else view_s - killed_s,
        "first_host_stall_s": stall_s,
        "first_host_join_s": joined_s - started_s,
    }


def kill_in_turn(trial: Trial, kills: int) -> None:
    """Kill the etcd members in turn. With each, a worker of another host is killed, and its successor joins."""
    for number in range(kills):
        etcd_host, worker_host, watcher = (HOSTS[(number + shift) % 3] for shift in range(3))
        trial.wait_whole(watcher)
        etcd = trial.hosts.etcd(etcd_host)
        member, pid = trial.member(worker_host)
        before, killed_s = trial.generation(watcher), time.monotonic()
        for victim in (etcd, pid):
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
        view_s = trial.view_without(member, watcher, before)
        if view_s is None:
            trial.lost += 1
        else:
            trial.view_s.append(view_s - killed_s)
    trial.wait_whole("h1")


def measured(folder: Path, *, steps: int, kills: int) -> dict[str, Any]:
    """All figures of the quorum. None, with the reason, where network namespaces cannot be made."""
    if (reason := lacking()) is not None:
        return {"quorum_reason": reason}
    arguments = ("--steps", str(steps), "--backups", "1")
    with quorum_hosts(folder, *HOSTS) as hosts:
        trial = Trial(hosts=hosts, arguments=arguments)
        began_s = time.monotonic()
        for host in HOSTS:
            trial.start(host)
        trial.wait_whole("h1")
        found: dict[str, Any] = {"started_s": trial.jobs["h1"].events("view")[0]["t"] - began_s}
        found |= lose_first_host(trial)
        kill_in_turn(trial, kills)
        ends = [job.finish(600.0) for job in trial.jobs.values()]
        left = sum(len(hosts.pids(host)) for host in HOSTS) + sum((run.folder / "quorum").exists() for run in ends)
    digests = {digest for run in ends for digest in run.digests.values()}
    return {
        **found,
        "digest_equal": digests == set(undisturbed(*arguments).digests.values()),
        "exit_codes": [run.exit_code for run in ends],
        "kills": kills,
        "views_lost": trial.lost,
        "worst_view_s": max(trial.view_s, default=None),
        "leftovers": left,
    }
