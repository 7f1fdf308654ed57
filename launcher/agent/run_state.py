"""State of a run for `status`, as one JSON object.

`describe` makes it from the core's state. `StateFile` writes it into the run's folder when the view changes and every
few seconds, where it remains after the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import asdict

from elastrain.decisions.membership import redundancy
from elastrain.job.world import Member
from elastrain.launcher.core import Core
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.rundir import EventLog, RunDir


def describe(core: Core, job: str, now: float) -> dict[str, Any]:
    """Return the state. Members of the view come first, in rank order, then this node's workers that warm up.

    Members that are gone appear only in the event log. `now`: monotonic seconds.
    """
    cluster, parking, view = core.cluster, core.parking, core.cluster.view
    waiting = [w for w in cluster.workers.by_id.values() if w.alive and (view is None or w.id not in view)]
    members = [_member(cluster, member, rank) for rank, member in enumerate(cluster.members)]
    return {
        "job": job,
        "at": round(time.time(), 3),
        "node": cluster.config.node,
        "state": _state(core),
        "armed": cluster.config.armed,
        "running_s": now - cluster.config.began_s,
        "roster": [record.name for record in cluster.roster.nodes] if cluster.roster is not None else None,
        "life": cluster.config.life.number,
        "generation": view.generation if view else 0,
        "step": cluster.progress.step,
        "loss": cluster.progress.loss,
        "samples": cluster.progress.samples,
        **_pace(cluster, now),
        "steps_lost": cluster.workers.steps_lost,
        "redone": cluster.progress.redone_pairs,
        "plan": cluster.progress.plan,
        "restarts_left": cluster.config.restarts_allowed - cluster.config.life.restarts - cluster.workers.restarts_used,
        "redundancy": _redundancy(core),
        "window": cluster.window.described(now),
        "checkpoint": cluster.checkpoints.newest.step if cluster.checkpoints.newest is not None else None,
        "checkpoint_ago_s": cluster.checkpoints.ago_s(now),
        "parked": parking.parked.reason if parking.parked else "",
        "parked_s": now - parking.parked.since_s if parking.parked else None,
        "store_away_s": now - parking.store_away_since_s if parking.store_away_since_s is not None else None,
        "nodes": _nodes(cluster),
        "devices": cluster.devices.described(),
        "members": members + [_worker(cluster, worker, None) for worker in waiting],
        "reasons": cluster.progress.recent.texts,
        "reasons_ago_s": cluster.progress.recent.ago_s(now),
        "exit_code": core.shutdown.end.code if core.shutdown.end else None,
        "end": asdict(core.shutdown.end) if core.shutdown.end else None,
    }


def _pace(cluster: Cluster, now: float) -> dict[str, Any]:
    """Return the end of the loop, the steps per minute, and the expected time until the end."""
    work = cluster.work
    return {
        "until": work.until,
        "steps_per_minute": work.pace.per_minute(now),
        "remaining_s": work.remaining_s(cluster.progress.step, now),
    }


def _redundancy(core: Core) -> str:
    backups = (core.joins.spec or {}).get("backups", 0)
    alive = core.cluster.alive_in_view()
    # A word in place of the number means a backup on every member.
    most = backups if isinstance(backups, int) else len(alive)
    return redundancy(core.cluster.holders or {}, alive, most, core.cluster.window.no_room)


def _state(core: Core) -> str:
    if core.shutdown.end is not None:
        return "finished" if core.shutdown.end.code == 0 else "stopped" if core.shutdown.end.code > 128 else "failed"
    return "starting" if core.cluster.view is None else "running"


def _nodes(cluster: Cluster) -> list[dict[str, Any]]:
    """Return the states of this node, then of the other nodes in the order of their start."""
    others = sorted(cluster.peers.nodes.values(), key=lambda node: node.record.incarnation)
    own = "spare here" if cluster.peers.record.spare else "here"
    here = {"node": cluster.config.node, "state": own, "endpoint": cluster.peers.record.endpoint}
    return [here] + [
        {
            "node": node.record.name,
            "state": "spare"
            if node.linked and node.record.spare
            else "linked"
            if node.linked
            else "silent"
            if node.leased
            else "lease gone",
            "endpoint": node.record.endpoint,
        }
        for node in others
    ]


def _member(cluster: Cluster, member: Member, rank: int) -> dict[str, Any]:
    worker = cluster.workers.by_id.get(member.id)
    if worker is not None:
        return _worker(cluster, worker, rank)
    state = "member" if cluster.is_alive(member.id) else "gone"
    unknown = {"pid": None, "step": None, "waits_for": "", "digest": "", "replaces": ""}
    known = cluster.work.of(member.id)
    return {"rank": rank, "id": member.id, "node": member.node, "state": state, **unknown, **known}


def _worker(cluster: Cluster, worker: Worker, rank: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "id": worker.id,
        "node": cluster.config.node,
        "pid": worker.pid,
        "state": worker.state,
        "step": worker.progress.step,
        "waits_for": worker.progress.waits_for,
        "digest": worker.digest or "",
        "replaces": worker.replaces,
        **cluster.work.of(worker.id),
    }


_STATE_EVERY_S = 5.0
"""Seconds between two writes, so that `status` has a recent state of a run whose agent was killed."""


class StateFile:
    """Writer of the state file. `describe` returns the state at a monotonic time."""

    def __init__(self, run: RunDir, log: EventLog, describe: Callable[[float], dict[str, Any]]) -> None:
        self._run, self._log, self._describe = run, log, describe
        self._written_s = 0.0
        self.stale = False
        """True if a change happened that `status` should show soon."""

    def on_tick(self, now: float) -> None:
        """Write the state if it is stale or old."""
        if self.stale or now - self._written_s > _STATE_EVERY_S:
            self.write(now)

    def write(self, now: float) -> None:
        """Write the state now."""
        self.stale, self._written_s = False, now
        try:
            self._run.write_state(self._describe(now))
        except OSError as error:  # a full disk must not end a job
            self._log.write("state_not_written", reason=str(error))
