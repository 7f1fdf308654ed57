"""A checkpoint of a job of one, as it stands when its script comes to a step: what a resume is tested with."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from elastrain.runtime.job import Job
from elastrain.runtime.loop.step import Step
from elastrain.snapshot.durable.manifest import LOOP, GroupEntry, Manifest, ParameterEntry, ShardEntry, name_of
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.writing import PartWriter


def save(job: Job, step: Step, folder: Path) -> Manifest:
    """Before the micro-batches of `step`: all that the step before has left."""
    prepared = job._ready()
    engine = prepared.engine
    executor, record = engine._parts.executor, engine._core.record
    assert record is not None and record.step == step.number - 1
    name = name_of(1, record.step)
    writer = PartWriter(place_at(str(folder)), name, writer="m0")
    written = [writer.write(executor.states[shard.index]) for shard in executor.layout.shards]
    loop = writer.attach(step._taken.text, step._taken.payload())
    writer.finish()
    layout = executor.layout
    manifest = Manifest(
        job="job",
        life=1,
        step=record.step,
        time_s=0.0,
        spec={
            **prepared.describe(),
            "layers' switches and numbers": prepared.parts.layers.digest(),
            **_set_before_the_loop(prepared.optimizer.hyperparameters()),
        },
        counters={"scaler": asdict(record.next_scaler)},
        optimizer="AdamW",
        parameters=tuple(
            ParameterEntry(name=spec.name, shape=spec.shape, dtype=spec.dtype, group=spec.group)
            for spec in layout.parameters
        ),
        groups=tuple(GroupEntry(parameters=(), hyper=hyper) for hyper in prepared.optimizer.hyperparameters()),
        shards=tuple(
            ShardEntry(
                index=shard.index,
                block=layout.blocks[shard.block],
                dtype=shard.master_dtype,
                numel=shard.numel,
                pieces=(),
                digest=written[shard.index].digest,
                parts=(written[shard.index].part,),
            )
            for shard in layout.shards
        ),
        attachments={LOOP: (loop,)},
    )
    publish(place_at(str(folder)), manifest)
    return manifest


def _set_before_the_loop(hyper: list[dict[str, Any]]) -> dict[str, Any]:
    """As `LoopState.describe` says it, of what a scheduler has changed meanwhile."""
    first = [{**group, "lr": group.get("initial_lr", group["lr"])} for group in hyper]
    return {
        f"{name} of parameter group {index}": value
        for index, group in enumerate(first)
        for name, value in group.items()
        if name in ("lr", "initial_lr", "betas", "eps", "weight_decay")
    }
