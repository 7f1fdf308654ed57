"""Three hosts, and the cable of one is cut for good, without a word to anybody. How long do the others stand still?

Hosts are network namespaces, each with an `elastrain run` of its own and TCP to the others; timeouts are the defaults.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.hosts import ETCD, Switch, impossible
from experiments.jobs import Script, elastic, finish
from experiments.journals import Follower, Member
from experiments.recovery.figures import longest_gap_s, spans_of

HOSTS = ("a", "b", "c")
CUT_AFTER_STEP = 5
TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.05


def measured(folder: Path, script: Script) -> dict[str, Any]:
    """`blackhole_standstill_s` and the digests of those who went on; None, with the reason, where it can not be run."""
    if (reason := impossible()) is not None:
        return {"blackhole_standstill_s": None, "blackhole_reason": reason}
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        switch = stack.enter_context(Switch(folder, HOSTS))
        jobs = {}
        for host in HOSTS:
            options = ("--nnodes", "2:3", "--rdzv-endpoint", ETCD, "--rdzv-id", "blackhole", "--node-name", host)
            options += ("--secret-file", str(folder / "secret"))
            job = elastic(folder / host, script, members=1, options=options, inside=switch.inside(host))
            jobs[host] = stack.enter_context(job)
        followers = {host: Follower(folder / host) for host in HOSTS}
        _wait_for_step(followers, CUT_AFTER_STEP)
        cut_s = time.monotonic()
        switch.cut("c")
        for host in ("a", "b"):
            finish(jobs[host], folder / host, timeout_s=TIMEOUT_S)
    there = [member for host in ("a", "b") for member in _members(followers[host])]
    until_s = max(ended_s for _, ended_s in spans_of(there))
    return {
        "blackhole_standstill_s": longest_gap_s(spans_of(there), cut_s, until_s),
        "blackhole_digests": sorted({member.digest for member in there if member.digest is not None}),
    }


def _wait_for_step(followers: dict[str, Follower], step: int) -> None:
    """Raises RuntimeError if the hosts do not come so far in time."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while not all(any(step in m.advanced_s for m in _members(follower)) for follower in followers.values()):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the three hosts did not come to step {step} within {TIMEOUT_S:g} s")
        time.sleep(_LOOK_EVERY_S)


def _members(follower: Follower) -> list[Member]:
    return list(follower.look().members.values())
