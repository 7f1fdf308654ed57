"""Small checkpoints for tests: states, a manifest about them, and a whole checkpoint in a place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import xxhash

from elastrain.snapshot.durable.manifest import (
    LOOP,
    MANIFEST,
    GroupEntry,
    Manifest,
    ParameterEntry,
    Part,
    PieceEntry,
    ShardEntry,
    name_of,
)
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.writing import PartWriter, Written
from elastrain.snapshot.shard_state import ShardState

NUMEL = 192
"""Elements of a shard: a weight of 10 x 13 in 130 + 62 of padding. Two shards hold `w0` and `w1`."""
SHAPE = (10, 13)


def state(shard: int, step: int) -> ShardState:
    """The same for equal arguments."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    piece = {
        "step": torch.tensor(float(step + 1)),
        "exp_avg": torch.randn(NUMEL, generator=generator),
        "exp_avg_sq": torch.zeros(NUMEL),
    }
    return ShardState(
        shard=shard,
        version=step,
        parameters=torch.randn(NUMEL, generator=generator),
        pieces=[dict(piece) if step >= 0 else {}],
    )


def manifest(
    step: int, written: Sequence[Sequence[Written]], loop: Sequence[Part] = (), *, life: int = 0, job: str = "job"
) -> Manifest:
    """`written`: the copies of each shard."""
    shards = tuple(
        ShardEntry(
            index=index,
            block="body",
            dtype="float32",
            numel=NUMEL,
            pieces=(PieceEntry(parameter=index, start=0, numel=NUMEL, valid_numel=130, offset=0),),
            digest=copies[0].digest,
            parts=tuple(copy.part for copy in copies),
        )
        for index, copies in enumerate(written)
    )
    names = [f"w{index}" for index in range(len(shards))]
    return Manifest(
        job=job,
        life=life,
        step=step,
        time_s=1000.0 + step,
        spec={"seed": 0},
        counters={"samples": 64 * (step + 1)},
        optimizer="AdamW",
        parameters=tuple(ParameterEntry(name=n, shape=SHAPE, dtype="float32", group=0) for n in names),
        groups=(GroupEntry(parameters=tuple(names), hyper={"lr": 0.1, "betas": [0.9, 0.99]}),),
        shards=shards,
        attachments={LOOP: tuple(loop)} if loop else {},
    )


def write_as_a_later_version(folder: Path) -> None:
    """A whole manifest in the place of this checkpoint's: of format 7, with a field that this version does not know."""
    body = b'{"job": "job", "rings": 3}'
    head = {"format": 7, "bytes": len(body), "xxh3": f"{xxhash.xxh3_64_intdigest(body):016x}", "packed": True}
    (folder / MANIFEST).write_bytes(msgspec.json.encode(head) + b"\n" + body)


def save(place: CheckpointPlace, step: int, *, life: int = 0, shards: int = 2) -> Manifest:
    """Write a whole checkpoint: two writers for the shards, the first one also for the loop's state."""
    name = manifest(step, (), life=life).name
    writers = [PartWriter(place, name, writer=f"m{number}") for number in range(2)]
    try:
        written = [[writers[index % 2].write(state(index, step))] for index in range(shards)]
        loop = writers[0].attach('{"hyper": []}', [torch.arange(5, dtype=torch.uint8)])
        for writer in writers:
            writer.finish()
    finally:
        for writer in writers:
            writer.give_up()
    made = manifest(step, written, [loop], life=life)
    publish(place, made)
    return made


def save_on_disks(places: Sequence[CheckpointPlace], step: int) -> Manifest:
    """A checkpoint on the local disks of several nodes: shard `i` lies on node `i` and the one after it."""
    name, count = name_of(0, step), len(places)
    writers = [PartWriter(place, name, writer=f"m{number}") for number, place in enumerate(places)]
    holders = [sorted({shard % count, (shard + 1) % count}) for shard in range(count)]
    written = [[writers[holder].write(state(shard, step)) for holder in holders[shard]] for shard in range(count)]
    loop = [writer.attach("loop") for writer in writers]
    for writer in writers:
        writer.finish()
    made = manifest(step, written, loop)
    for place in places:
        publish(place, made)
    return made
