"""The states that are saved and read: those of an MLP with at least 20 M parameters after some steps of AdamW."""

from __future__ import annotations

import torch
from msgspec.structs import replace
from torch import nn

from elastrain.snapshot.durable.manifest import Manifest, ParameterEntry, PieceEntry, ShardEntry, name_of
from elastrain.snapshot.durable.places.port import CheckpointPlace
from elastrain.snapshot.durable.publishing import publish
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.shard_state import ShardState

SHARD_NUMEL = 1 << 20
WIDTH = 1024


def trained(layers: int, steps: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """`layers` square layers without biases, each a whole number of shards."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, WIDTH)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def states(model: nn.Module, optimizer: torch.optim.Optimizer, shard_numel: int = SHARD_NUMEL) -> list[ShardState]:
    """Cut into shards; views of the model's and the optimizer's tensors."""
    found = []
    for parameter in model.parameters():
        kept = {name: value.view(-1) if value.dim() else value for name, value in optimizer.state[parameter].items()}
        flat = parameter.detach().view(-1)
        for start in range(0, flat.numel(), shard_numel):
            piece = {n: v[start : start + shard_numel] if v.dim() else v for n, v in kept.items()}
            values = flat[start : start + shard_numel]
            found.append(ShardState(shard=len(found), version=0, parameters=values, pieces=[piece]))
    return found


def save(place: CheckpointPlace, all_states: list[ShardState], step: int, writers: int = 1) -> Manifest:
    """A checkpoint of them, each writer with every n-th shard."""
    made = [PartWriter(place, name_of(1, step), writer=f"m{number}") for number in range(writers)]
    written = [made[state.shard % writers].write(state) for state in all_states]
    for writer in made:
        writer.finish()
    numel = all_states[0].parameters.numel()
    piece = PieceEntry(parameter=0, start=0, numel=numel, valid_numel=numel, offset=0)
    shards = tuple(
        ShardEntry(
            index=one.shard,
            block="all",
            dtype="float32",
            numel=numel,
            pieces=(replace(piece, parameter=one.shard),),
            digest=one.digest,
            parts=(one.part,),
        )
        for one in written
    )
    manifest = Manifest(
        job="experiment",
        life=1,
        step=step,
        time_s=0.0,
        spec={},
        counters={},
        optimizer="AdamW",
        parameters=tuple(
            ParameterEntry(name=f"w{one.shard}", shape=(numel,), dtype="float32", group=0) for one in written
        ),
        groups=(),
        shards=shards,
        attachments={},
    )
    publish(place, manifest)
    return manifest
