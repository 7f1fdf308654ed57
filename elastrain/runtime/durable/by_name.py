"""Conversion of a checkpoint with other shards, or without shards, into shards of this model, by parameter names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.job.layout import STATISTICS, Layout, ParameterSpec, Shard
from elastrain.pipeline.stubs.naming import plain_name
from elastrain.snapshot.durable.manifest import ParameterEntry
from elastrain.snapshot.durable.plain import PlainState
from elastrain.snapshot.shard_state import ShardState, Value

States = Mapping[str, Mapping[str, Value]]
"""State of the optimizer by parameter name, in the shapes of the parameters."""


@dataclass(frozen=True)
class _Overlap:
    """The part of a parameter in a shard: `numel` elements, from `start` in the shard and `offset` in the parameter."""

    spec: ParameterSpec
    start: int
    numel: int
    offset: int


def check(entries: Mapping[str, ParameterEntry], layout: Layout, source: str) -> None:
    """Raise ConfigError if a parameter or running statistic of this model is missing in `entries` or does not match.

    A shape must be equal. A dtype must be of the same kind (floating-point, complex or other). `source` names the
    checkpoint in the error message.
    """
    for spec in layout.parameters:
        entry = entries.get(spec.name)
        if entry is None:
            raise ConfigError(
                f"the model has {spec.name!r}, and {source} does not (it has {_some(entries)}): it is of another model"
            )
        if entry.shape != spec.shape:
            which = f"of shape {spec.shape} in the model and of {entry.shape} in {source}"
            raise ConfigError(f"{entry.name!r} is {which}: it is of another model")
        if spec.group != STATISTICS and _kind(entry.dtype) != _kind(spec.dtype):
            which = f"{spec.dtype} in the model and {entry.dtype} in {source}"
            raise ConfigError(f"{entry.name!r} is {which}: convert it to {spec.dtype} first")


def homes(model: nn.Module, layout: Layout) -> dict[str, str]:
    """Map each name in the model's state_dict to the name that the layout uses for the same memory.

    A name that the layout does not know maps to itself.
    """
    named = model.state_dict(keep_vars=True).items()
    state = {plain_name(name): value for name, value in named if isinstance(value, Tensor)}
    found = {(state[spec.name].data_ptr(), spec.shape): spec.name for spec in layout.parameters if spec.numel}
    return {name: found.get((value.data_ptr(), tuple(value.shape)), name) for name, value in state.items()}


def untied(plain: PlainState, homes: Mapping[str, str], source: str) -> PlainState:
    """Return the state under the layout's names.

    Raises ConfigError if two names of one tied weight have different values in the checkpoint.
    """
    model, first = dict[str, Tensor](), dict[str, str]()
    for saved, value in plain.model.items():
        name = plain_name(saved)  # earlier versions wrote the names of wrappers
        home = homes.get(name, name)
        other = model.setdefault(home, value)
        if first.setdefault(home, name) != name and not _same_bits(value, other):
            raise ConfigError(
                f"{first[home]!r} and {name!r} are one weight in the model, and two in {source}, with other values: "
                "leave out the wrong one, or do not tie them"
            )
    return replace(
        plain, model=model, state={homes.get(n := plain_name(name), n): kept for name, kept in plain.state.items()}
    )


def shard_state(plain: PlainState, layout: Layout, shard: Shard, step: int) -> ShardState:
    """Return the state of one shard after `step`. Gaps between parameters are zero, as in a new model."""
    parameters = torch.zeros(shard.numel, dtype=getattr(torch, shard.master_dtype))
    for part in _overlaps(layout, shard):
        value = plain.masters.get(part.spec.name, plain.model[part.spec.name])
        parameters[part.start : part.start + part.numel] = _cut(value, part)
    states = optimizer_pieces(plain.state, layout, shard)
    return ShardState(shard=shard.index, version=step, parameters=parameters, pieces=states)


def optimizer_pieces(state: States, layout: Layout, shard: Shard) -> list[dict[str, Value]]:
    """Return the optimizer's state for each piece of a shard. It is empty for a parameter that was never stepped."""
    at = {part.start: part for part in _overlaps(layout, shard)}
    pieces = layout.pieces[shard.index]
    return [_piece(state, at[piece.start], piece.stop - piece.start) if piece.start in at else {} for piece in pieces]


def _overlaps(layout: Layout, shard: Shard) -> Iterator[_Overlap]:
    for leaf in layout.leaves:
        start, stop = max(leaf.start, shard.start), min(leaf.start + leaf.numel, shard.stop)
        if leaf.flat == shard.flat and start < stop:
            spec = layout.parameters[leaf.parameter]
            yield _Overlap(spec, start - shard.start, stop - start, start - leaf.start)


def _piece(state: States, part: _Overlap, numel: int) -> dict[str, Value]:
    return {name: _entry(name, value, part, numel) for name, value in state.get(part.spec.name, {}).items()}


def _entry(name: str, value: Value, part: _Overlap, numel: int) -> Value:
    # Step counters are scalars and are not cut. A scalar parameter has scalar moments, so the name decides.
    if not isinstance(value, Tensor) or tuple(value.shape) != part.spec.shape or name == "step":
        return value.clone() if isinstance(value, Tensor) else value
    whole = torch.zeros(numel, dtype=value.dtype)
    whole[: part.numel] = _cut(value, part)
    return whole


def _cut(value: Tensor, part: _Overlap) -> Tensor:
    return value.reshape(-1)[part.offset : part.offset + part.numel]


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = [each.reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and torch.equal(*bits)


def _kind(dtype: str) -> tuple[bool, bool]:
    of: torch.dtype = getattr(torch, dtype)
    return of.is_floating_point, of.is_complex


def _some(shapes: Iterable[str]) -> str:
    names = sorted(shapes)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
