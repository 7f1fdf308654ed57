"""A member's durable checkpoints without its engine: what it would be told is called by the test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastrain import protocol as p
from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.job.checkpoint_plan import Checkpointed
from elastrain.job.values import Contribution, Record
from elastrain.protocol import agent_messages as am
from elastrain.runtime.durable.member_checkpoints import Bearings, Checkpoints


def member_checkpoints(
    options: CheckpointOptions | Path,
    *,
    tell: Callable[[p.Event], None] = lambda _event: None,
    say: Callable[[am.FromWorker], None] = lambda _message: None,
    log: Callable[..., None] = lambda *_, **__: None,
) -> Checkpoints:
    """Those of m0 in a job of one, opened; the model has no buffers. `options`: a place's folder will do."""
    bearings = Bearings(
        options=options if isinstance(options, CheckpointOptions) else CheckpointOptions(place=str(options)),
        me="m0",
        job="job",
        life=1,
        resume=None,
        tell=tell,
        wake=lambda: None,
        say=say,
        has_agent=False,
        log=log,
    )
    described: Any = SimpleNamespace(buffers=dict)
    made = Checkpoints(bearings, described)
    made.open()
    return made


def record_of(step: int, checkpoint: Checkpointed = Checkpointed.TAKEN) -> Record:
    """The record that commits a step, and takes a checkpoint of it."""
    return Record(
        step=step,
        generation=1,
        contribution=Contribution(),
        square_norm=0.0,
        skipped=False,
        switch=False,
        checkpoint=checkpoint,
    )
