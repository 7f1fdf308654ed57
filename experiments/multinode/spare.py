"""A job of two nodes and a spare on three hosts: a computing host's cable is cut for good, and the spare takes over."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastrain.launcher.namespaces.impairments import Unplugged, condition
from elastrain.launcher.namespaces.switch import lacking
from tests.support.nodes_harness import NodesJob
from tests.support.quorum_harness import quorum_hosts
from tests.support.training import undisturbed
from tests.support.waiting import until

HOSTS = ("h0", "h1", "h2")
WAIT_S = 150.0


def waiting_host(jobs: Mapping[str, NodesJob]) -> str:
    """The host whose node waits as a spare, or "" while there is none."""
    return next((host for host, job in jobs.items() if job.events("spare_waits", node=host)), "")


def took_over_s(jobs: Mapping[str, NodesJob], spare: str, watcher: str) -> float:
    """When a view with a worker of the spare came, in the log of the watcher. 0 if none has come yet."""
    started = {event["member"] for event in jobs[spare].events("worker_start")}
    views = jobs[watcher].events("view")
    return next((float(view["t"]) for view in views if started & set(view["members"])), 0.0)


def measured(folder: Path, *, steps: int) -> dict[str, Any]:
    """The figures. The first host that computes is cut off; its node is killed when the others have finished."""
    if (reason := lacking()) is not None:
        return {"spare_reason": reason}
    arguments = ("--steps", str(steps), "--backups", "1")
    with quorum_hosts(folder, *HOSTS) as hosts:
        options = ("--nnodes", "2", "--spares", "1", "--last-call", "60")
        jobs = {host: hosts.start(host, *options, arguments=arguments) for host in HOSTS}
        spare = until(lambda: waiting_host(jobs), WAIT_S, "a spare")
        cut, watcher = (host for host in HOSTS if host != spare)
        for host in (cut, watcher):
            jobs[host].wait_step(2, timeout_s=WAIT_S)
        until(lambda: all(hosts.etcd(each) for each in HOSTS), WAIT_S, "an etcd member on each host")
        jobs[watcher].wait_copied(WAIT_S)
        cut_s = time.monotonic()
        hosts.switch.apply(condition([Unplugged(host=cut)]))
        came_s = until(lambda: took_over_s(jobs, spare, watcher), WAIT_S, f"the spare\n{jobs[watcher].text()}")
        began_s = float(jobs[spare].events("spare_begins")[0]["t"])
        jobs[watcher].wait_copied(WAIT_S)
        ends = [jobs[host].finish(600.0) for host in (watcher, spare)]
        left = sum(len(hosts.pids(host)) for host in (watcher, spare)) + sum(
            (run.folder / "quorum").exists() for run in ends
        )
    digests = {digest for run in ends for digest in run.digests.values()}
    return {
        "spare_begins_s": began_s - cut_s,
        "spare_takeover_s": came_s - cut_s,
        "spare_digest_equal": digests == set(undisturbed(*arguments).digests.values()),
        "spare_exit_codes": [run.exit_code for run in ends],
        "spare_leftovers": left,
    }
