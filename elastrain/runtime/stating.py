"""What `prepare` does where nobody wants a job, but to know what a job will hold in memory (`elastrain doctor`)."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import NoReturn

import torch

from elastrain.base.stating import StatementWish
from elastrain.books.behind import BEHIND_BYTES
from elastrain.layout import Layout
from elastrain.memory_statement import ScriptNeeds, WorkerLimit, state_memory
from elastrain.runtime.assembly import Chosen, Request
from elastrain.runtime.flats import frozen_shards, has_masters, in_private_memory
from elastrain.runtime.memory import PeakMeter
from elastrain.runtime.memory_keeper import MemoryLimit
from elastrain.runtime.model import ModelState
from elastrain.runtime.optimizer import PieceOptimizer
from elastrain.runtime.planned_work import ASSUMED_MOMENTS


def answer(wish: StatementWish, request: Request, layout: Layout, chosen: Chosen) -> NoReturn:
    """Write what each member will hold, and end the process. Raises SystemExit; ConfigError as `prepare` does."""
    script = script_needs(wish, request, layout, chosen)
    members = [{**asdict(each), "total": each.total} for each in state_memory(script, wish.members)]
    wish.answer(
        json.dumps(
            {"backups": script.backups, "limit": chosen.limit.limit_bytes if chosen.limit else None, "members": members}
        )
    )
    raise SystemExit(0)


def script_needs(wish: StatementWish, request: Request, layout: Layout, chosen: Chosen) -> ScriptNeeds:
    """Measure what the script prepares. The model and its optimizer are taken over, as for a job."""
    held_bytes = PeakMeter(lambda: 0).now_bytes
    pieces = PieceOptimizer(request.optimizer, layout, elementwise=request.elementwise)
    model = ModelState(request.model, layout, in_private_memory)
    shape = chosen.settings.shape(layout, model.lanes(), request.loader.micro_batches)
    return ScriptNeeds(
        sizes=shape.sizes,
        moments=_moments(pieces, layout),
        masters=has_masters(layout),
        frozen=frozen_shards(layout),
        model_bytes=model.nbytes,
        slot_bytes=model.gradients.copy_bytes,
        runs=shape.runs,
        backups=shape.backups if wish.backups is None else wish.backups,
        base_bytes=max(0, held_bytes - model.nbytes),
        behind_bytes=BEHIND_BYTES,
        all_write=None if chosen.checkpoints is None else chosen.checkpoints.is_local,
        limit=_limit(chosen.limit),
    )


def _limit(limit: MemoryLimit | None) -> WorkerLimit | None:
    if limit is None:
        return None
    return WorkerLimit(limit_bytes=limit.limit_bytes, has_disk=bool(limit.directories), assumed_moments=ASSUMED_MOMENTS)


def _moments(pieces: PieceOptimizer, layout: Layout) -> tuple[float, ...]:
    """Per shard, bytes of the optimizer's state per byte of its parameters: one update of zeros tells."""
    hyper = pieces.hyperparameters()
    found = []
    # One shard at a time, so that this process never holds what eight members share.
    for shard in layout.shards:
        parameters = torch.zeros(shard.numel, dtype=getattr(torch, shard.master_dtype))
        state = pieces.create(shard, parameters)
        if layout.pieces[shard.index]:
            pieces.apply([(state, torch.zeros_like(parameters), None)], hyper=hyper)
        found.append((state.nbytes - parameters.nbytes) / max(1, parameters.nbytes))
    return tuple(found)
