"""What `status` shows, as one JSON object: made from the core's state, kept in the run's folder after the end."""

from __future__ import annotations

from typing import Any

from elastrain.launcher.core import Core
from elastrain.launcher.values import Worker


def describe(core: Core, job: str) -> dict[str, Any]:
    """Members of the view in rank order first, then workers that warm up; the gone are left to the event log."""
    view = core.view
    ranks = {member: rank for rank, member in enumerate(view.ids)} if view else {}
    shown = [w for w in core.workers.values() if w.id in ranks or w.alive]
    shown.sort(key=lambda w: ranks.get(w.id, len(ranks)))
    return {
        "job": job,
        "state": _state(core),
        "generation": view.generation if view else 0,
        "step": core.step,
        "loss": core.loss,
        "samples": core.samples,
        "steps_lost": core.steps_lost,
        "restarts_left": core.config.max_restarts - core.restarts_used,
        "window": core.window,
        "members": [_member(core, worker, ranks.get(worker.id)) for worker in shown],
        "reasons": core.reasons,
        "exit_code": core.end.code if core.end else None,
    }


def _state(core: Core) -> str:
    if core.end is not None:
        return "finished" if core.end.code == 0 else "stopped" if core.end.code > 128 else "failed"
    return "starting" if core.view is None else "running"


def _member(core: Core, worker: Worker, rank: int | None) -> dict[str, Any]:
    return {
        "rank": rank,
        "id": worker.id,
        "node": core.config.node,
        "pid": worker.pid,
        "state": str(worker.stage) if not worker.finished else "finished",
        "step": worker.step,
        "phase": worker.phase,
        "digest": worker.digest,
    }
