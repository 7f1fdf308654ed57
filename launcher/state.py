"""What `status` shows, as one JSON object: made from the core's state, kept in the run's folder after the end."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.core import Core
from elastrain.launcher.values import Worker
from elastrain.membership import redundancy
from elastrain.world import Member


def describe(core: Core, job: str, now: float) -> dict[str, Any]:
    """Members of the view in rank order first, then this node's warming up; the gone are left to the event log.

    `now`: monotonic seconds.
    """
    view = core.view
    ranked = view.members if view else ()
    waiting = [w for w in core.workers.values() if w.alive and (view is None or w.id not in view)]
    members = [_member(core, member, rank) for rank, member in enumerate(ranked)]
    return {
        "job": job,
        "node": core.config.node,
        "state": _state(core),
        "roster": [record.name for record in core.roster.nodes] if core.roster is not None else None,
        "generation": view.generation if view else 0,
        "step": core.step,
        "loss": core.loss,
        "samples": core.samples,
        "steps_lost": core.steps_lost,
        "restarts_left": core.config.max_restarts - core.restarts_used,
        "redundancy": _redundancy(core),
        "parked": core.parked.reason if core.parked else "",
        "parked_s": now - core.parked.since_s if core.parked else None,
        "store_away_s": now - core.store_away_since_s if core.store_away_since_s is not None else None,
        "nodes": _nodes(core),
        "members": members + [_worker(core, worker, None) for worker in waiting],
        "reasons": core.reasons,
        "exit_code": core.end.code if core.end else None,
        "end": vars(core.end) if core.end else None,
    }


def _redundancy(core: Core) -> str:
    backups = (core.spec or {}).get("backups", 0)
    alive = [member for member in (core.view.ids if core.view else ()) if core.is_alive(member)]
    # A word, not a number, means everywhere.
    return redundancy(core.holders or {}, alive, backups if isinstance(backups, int) else len(alive))


def _state(core: Core) -> str:
    if core.end is not None:
        return "finished" if core.end.code == 0 else "stopped" if core.end.code > 128 else "failed"
    return "starting" if core.view is None else "running"


def _nodes(core: Core) -> list[dict[str, Any]]:
    """This node, then the others in the order in which they came."""
    others = sorted(core.nodes.values(), key=lambda node: node.record.incarnation)
    here = {"node": core.config.node, "state": "here", "endpoint": core.record.endpoint}
    return [here] + [
        {
            "node": node.record.name,
            "state": "linked" if node.linked else "silent" if node.leased else "lease gone",
            "endpoint": node.record.endpoint,
        }
        for node in others
    ]


def _member(core: Core, member: Member, rank: int) -> dict[str, Any]:
    worker = core.workers.get(member.id)
    if worker is not None:
        return _worker(core, worker, rank)
    state = "member" if core.is_alive(member.id) else "gone"
    unknown = {"pid": None, "step": None, "digest": ""}
    return {"rank": rank, "id": member.id, "node": member.node, "state": state, **unknown}


def _worker(core: Core, worker: Worker, rank: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "id": worker.id,
        "node": core.config.node,
        "pid": worker.pid,
        "state": str(worker.stage) if not worker.finished else "finished",
        "step": worker.step,
        "digest": worker.digest,
    }
