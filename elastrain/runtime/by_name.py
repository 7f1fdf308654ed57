"""Shards of this model from a checkpoint that was cut otherwise, or never: found by the names of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.layout import Layout, ParameterSpec, Shard
from elastrain.snapshot.durable.plain import PlainState
from elastrain.snapshot.state import ShardState, Value


@dataclass(frozen=True)
class _Overlap:
    """Elements `start..start + numel` of a shard are those of a parameter from its element `offset` on."""

    spec: ParameterSpec
    start: int
    numel: int
    offset: int


def check(shapes: Mapping[str, tuple[int, ...]], layout: Layout, source: str) -> None:
    """Raises ConfigError where a parameter or running statistic of this model is missing, or has another shape."""
    for spec in layout.parameters:
        shape = shapes.get(spec.name)
        if shape is None:
            raise ConfigError(
                f"the model has {spec.name!r}, and {source} does not (it has {_some(shapes)}): it is of another model"
            )
        if shape != spec.shape:
            which = f"of shape {spec.shape} in the model and of {shape} in {source}"
            raise ConfigError(f"{spec.name!r} is {which}: it is of another model")


def shard_state(plain: PlainState, layout: Layout, shard: Shard, step: int) -> ShardState:
    """The state of one shard after `step`. What lies between parameters is zero, as in a new model."""
    parameters = torch.zeros(shard.numel, dtype=getattr(torch, shard.master_dtype))
    overlaps = list(_overlaps(layout, shard))
    for part in overlaps:
        value = plain.masters.get(part.spec.name, plain.model[part.spec.name])
        parameters[part.start : part.start + part.numel] = _cut(value, part)
    pieces = layout.pieces[shard.index]
    at = {part.start: part for part in overlaps}
    states = [_piece(plain, at[piece.start], piece.stop - piece.start) if piece.start in at else {} for piece in pieces]
    return ShardState(shard=shard.index, version=step, parameters=parameters, pieces=states)


def _overlaps(layout: Layout, shard: Shard) -> Iterator[_Overlap]:
    for leaf in layout.leaves:
        start, stop = max(leaf.start, shard.start), min(leaf.start + leaf.numel, shard.stop)
        if leaf.flat == shard.flat and start < stop:
            spec = layout.parameters[leaf.parameter]
            yield _Overlap(spec, start - shard.start, stop - start, start - leaf.start)


def _piece(plain: PlainState, part: _Overlap, numel: int) -> dict[str, Value]:
    """What the optimizer keeps for this part of the parameter; nothing where it was never stepped."""
    return {name: _entry(name, value, part, numel) for name, value in plain.state.get(part.spec.name, {}).items()}


def _entry(name: str, value: Value, part: _Overlap, numel: int) -> Value:
    # A counter of steps has no dimension, nor have moments of a parameter without any.
    if not isinstance(value, Tensor) or tuple(value.shape) != part.spec.shape or name == "step":
        return value.clone() if isinstance(value, Tensor) else value
    whole = torch.zeros(numel, dtype=value.dtype)
    whole[: part.numel] = _cut(value, part)
    return whole


def _cut(value: Tensor, part: _Overlap) -> Tensor:
    return value.reshape(-1)[part.offset : part.offset + part.numel]


def _some(shapes: Iterable[str]) -> str:
    names = sorted(shapes)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
