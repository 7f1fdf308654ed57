"""The partition of a model into blocks, flat buffers, shards, pieces and gradient leaves, made once.

It depends on the model and its parameter groups, never on the members. Every digest of the job depends on it, so
members compare it when they join (`Layout.digest`). No tensors, only names and numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from hashlib import blake2b

from elastrain.errors import ConfigError

ALIGN = 64
"""Elements. Parameters and shards start at multiples of it, so that vectorised kernels never see tails."""
FROZEN = -1
"""Group of parameters that no optimizer updates. They are published to joining members, but have no gradient."""
STATISTICS = -2
"""Group of running statistics. No optimizer updates them, but each micro-batch contributes to them."""
# A smaller shard costs more in messages and digests than its optimizer's step does.
MIN_SHARD_NUMEL = 4096
# A shard is copied and digested in one go: a larger one would keep a member from its messages for too long.
MAX_SHARD_NUMEL = 4 * 1024 * 1024


def master_dtype(dtype: str) -> str:
    """Return the dtype in which gradients of `dtype` are summed and parameters updated: float32 for half precision."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def round_up(numel: int) -> int:
    """Round up to a multiple of ALIGN."""
    return -(-numel // ALIGN) * ALIGN


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """A parameter, with the name under which the first block registers it, or a running statistic."""

    name: str
    block: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix, e.g. `float32`."""
    group: int
    """Index of the optimizer's parameter group, FROZEN if it is in none, or STATISTICS."""
    requires_grad: bool

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a scalar."""
        numel = 1
        for size in self.shape:
            numel *= size
        return numel

    @property
    def trained(self) -> bool:
        """True if autograd computes its gradient and an optimizer updates it."""
        return self.requires_grad and self.group >= 0

    @property
    def flat_group(self) -> int:
        """Group of the flats that it may lie in."""
        # A flat's gradient is one contiguous tensor, so parameters without a gradient must lie elsewhere.
        return self.group if self.trained or self.group == STATISTICS else FROZEN


@dataclass(frozen=True, kw_only=True)
class Leaf:
    """The place of one parameter in one flat. In a trained flat it is also a gradient leaf of autograd."""

    index: int
    parameter: int
    block: int
    flat: int
    start: int
    """Offset in the flat, a multiple of ALIGN, in elements."""
    numel: int


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A 1-D buffer of the parameters of one (block, parameter group, dtype), and of their gradients.

    A tied parameter has a flat of its own. Its leaf in a later block has an alias flat, which is only a gradient.
    """

    index: int
    block: int
    group: int
    dtype: str
    """Data type of the parameters."""
    numel: int
    alias_of: int | None = None

    @property
    def trained(self) -> bool:
        """True if it has a gradient. Frozen flats and statistics have none."""
        return self.group >= 0

    @property
    def folded(self) -> bool:
        """True if micro-batches contribute to it: gradients, or two numbers for each element of statistics."""
        return self.group != FROZEN

    @property
    def folded_numel(self) -> int:
        """Elements of a micro-batch's contribution: for statistics two each, of the map `keep * old + add`."""
        return 2 * self.numel if self.group == STATISTICS else self.numel

    @property
    def master_dtype(self) -> str:
        """Data type of its gradients."""
        return master_dtype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class GradientLane:
    """One block's share of a shard's gradient: the shard's range, in the gradient of `flat`."""

    block: int
    flat: int


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Elements `start..stop` of a flat: the unit of optimizer ownership.

    Its gradient is the sum of its lanes in their order, each folded alone. A frozen shard has no lanes and no pieces. A
    shard of statistics has one lane and no pieces.
    """

    index: int
    block: int
    flat: int
    start: int
    stop: int
    dtype: str
    lanes: tuple[GradientLane, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    @property
    def master_dtype(self) -> str:
        """Data type of the optimizer's state and its parameters. The model's parameters are rounded from these."""
        return master_dtype(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """The part of a parameter that lies in a shard; the optimizer steps it as one tensor.

    `start..stop` count from the shard's start and include the padding. The first `valid_numel` elements are real.
    """

    shard: int
    parameter: int
    group: int
    start: int
    stop: int
    valid_numel: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The complete partition of a model, as `cut` makes it. Parts refer to one another by index."""

    blocks: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    """Running statistics come last."""
    leaves: tuple[Leaf, ...]
    flats: tuple[Flat, ...]
    shards: tuple[Shard, ...]
    pieces: tuple[tuple[Piece, ...], ...]
    """Per shard, in order."""
    shard_numel: int

    def digest(self) -> str:
        """Return 32 hexadecimal digits over every field. Members with equal digests have equal partitions."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return blake2b(text.encode(), digest_size=16, person=b"elastrain-layout").hexdigest()

    def leaves_of(self, block: int) -> tuple[Leaf, ...]:
        """Return the gradient leaves of a block; frozen parameters have none."""
        return self._leaves_by_block[block]

    def touched_parameters(self, leaves: Iterable[int]) -> frozenset[int]:
        """Return the parameters of these leaves: those with a gradient, if `leaves` are the ones that got one."""
        return frozenset(self.leaves[leaf].parameter for leaf in leaves)

    # Cached, because it is used for every block of every run.
    @cached_property
    def _leaves_by_block(self) -> tuple[tuple[Leaf, ...], ...]:
        trained = [leaf for leaf in self.leaves if self.flats[leaf.flat].trained]
        return tuple(tuple(leaf for leaf in trained if leaf.block == block) for block in range(len(self.blocks)))


def default_shard_numel(total_numel: int) -> int:
    """Choose a shard size: about 64 shards per model, so that votes stay small, of 4096 to 4 Mi elements each."""
    return max(MIN_SHARD_NUMEL, min(MAX_SHARD_NUMEL, round_up(-(-total_numel // 64))))


def cut(
    parameters: Sequence[ParameterSpec],
    *,
    blocks: Sequence[str],
    ties: Mapping[str, Sequence[str]] | None = None,
    shard_numel: int | None = None,
) -> Layout:
    """Cut a model into a Layout.

    parameters: in the model's order, running statistics last.
    blocks: names in the model's order.
    ties: parameter name -> the other blocks in which the same parameter is registered.
    shard_numel: elements per shard, a multiple of ALIGN; by default derived from the model's size.

    Raises ConfigError if names or blocks do not fit together.
    """
    ties = {name: others for name, others in (ties or {}).items() if others}
    _check(parameters, blocks, ties)
    size = default_shard_numel(sum(p.numel for p in parameters)) if shard_numel is None else shard_numel
    # A shard that began in the middle of a vector would be computed with other instructions than its neighbour.
    if size <= 0 or size % ALIGN:
        raise ConfigError(f"shard size must be a positive multiple of {ALIGN} elements; got {size}")
    flats, leaves = _lay_out(parameters, list(blocks), ties)
    shards = _cut_shards(flats, size)
    return Layout(
        blocks=tuple(blocks),
        parameters=tuple(parameters),
        leaves=tuple(leaves),
        flats=tuple(flats),
        shards=tuple(shards),
        pieces=tuple(_cut_pieces(shard, parameters, flats, leaves) for shard in shards),
        shard_numel=size,
    )


def _check(parameters: Sequence[ParameterSpec], blocks: Sequence[str], ties: Mapping[str, Sequence[str]]) -> None:
    if len(set(blocks)) != len(blocks):
        raise ConfigError(f"each block is named once; got {list(blocks)}")
    # A checkpoint finds parameters by their names, so two must not have the same one.
    by_name = {p.name: p for p in parameters}
    if len(by_name) != len(parameters):
        raise ConfigError("each parameter is named once")
    unknown = {p.block for p in parameters} - set(blocks)
    if unknown:
        raise ConfigError(
            f"parameters belong to blocks that are not named: {sorted(unknown)}; blocks are {list(blocks)}"
        )
    for name, others in ties.items():
        if name not in by_name:
            raise ConfigError(f"tie of an unknown parameter {name!r}")
        # Lanes are added in the order of the blocks here, which therefore affects the bits.
        order = [blocks.index(block) if block in blocks else -1 for block in (by_name[name].block, *others)]
        if min(order) < 0 or order != sorted(set(order)):
            raise ConfigError(f"the blocks of {name!r} must be known, distinct and in the model's order; got {others}")


def _lay_out(
    parameters: Sequence[ParameterSpec], blocks: list[str], ties: Mapping[str, Sequence[str]]
) -> tuple[list[Flat], list[Leaf]]:
    """Lay flats out in block order, each with its parameters in the model's order; alias flats come last."""
    # A tied parameter gets a flat of its own: its shards have several lanes, those of its neighbours have one.
    members: dict[tuple[int, int, str, str], list[int]] = {}
    for index, spec in enumerate(parameters):
        tied = spec.trained and spec.name in ties
        key = (blocks.index(spec.block), spec.flat_group, spec.dtype, spec.name if tied else "")
        members.setdefault(key, []).append(index)
    flats: list[Flat] = []
    leaves: list[Leaf] = []
    home: dict[str, Flat] = {}
    # In the model's order, not in that of the keys: names of dtypes must not affect the bits.
    for (block, group, dtype, tied_name), indices in sorted(members.items(), key=lambda item: (item[0][0], item[1][0])):
        start = 0
        for index in indices:
            numel = parameters[index].numel
            leaves.append(
                Leaf(index=len(leaves), parameter=index, block=block, flat=len(flats), start=start, numel=numel)
            )
            # The padding belongs to the parameter before it, so that no kernel sees a tail.
            start += round_up(numel)
        flats.append(Flat(index=len(flats), block=block, group=group, dtype=dtype, numel=start))
        if tied_name:
            home[tied_name] = flats[-1]
    # In every later block a tied parameter has one more gradient, but no parameters of its own: an alias flat.
    for name, flat in home.items():
        first = next(leaf for leaf in leaves if leaf.flat == flat.index)
        for block in map(blocks.index, ties[name]):
            leaves.append(replace(first, index=len(leaves), block=block, flat=len(flats)))
            flats.append(replace(flat, index=len(flats), block=block, alias_of=flat.index))
    return flats, leaves


def _cut_shards(flats: Sequence[Flat], size: int) -> list[Shard]:
    shards: list[Shard] = []
    for flat in flats:
        # Alias flats are lanes of their original's shards.
        if flat.alias_of is not None:
            continue
        aliases = [other for other in flats if other.alias_of == flat.index]
        # Newcomers receive shards of frozen parameters and statistics too. Frozen shards have no gradient lanes.
        lanes = tuple(GradientLane(block=f.block, flat=f.index) for f in (flat, *aliases)) if flat.folded else ()
        for start in range(0, flat.numel, size):
            stop = min(start + size, flat.numel)
            shards.append(
                Shard(
                    index=len(shards),
                    block=flat.block,
                    flat=flat.index,
                    start=start,
                    stop=stop,
                    dtype=flat.dtype,
                    lanes=lanes,
                )
            )
    return shards


def _cut_pieces(
    shard: Shard, parameters: Sequence[ParameterSpec], flats: Sequence[Flat], leaves: Sequence[Leaf]
) -> tuple[Piece, ...]:
    if not flats[shard.flat].trained:
        return ()
    pieces = []
    # One per parameter, so that `step` counters and missing gradients mean the same as in torch, however it was cut.
    for leaf in leaves:
        start, stop = max(shard.start, leaf.start), min(shard.stop, leaf.start + round_up(leaf.numel))
        if leaf.flat == shard.flat and start < stop:
            pieces.append(
                Piece(
                    shard=shard.index,
                    parameter=leaf.parameter,
                    group=parameters[leaf.parameter].group,
                    start=start - shard.start,
                    stop=stop - shard.start,
                    valid_numel=min(stop, leaf.start + leaf.numel) - start,
                )
            )
    return tuple(pieces)
