"""Flat buffers: the tensors behind a layout's flats, as slices of few allocations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from elastrain.layout import Layout

Allocate = Callable[[int, torch.dtype], Tensor]
"""`(numel, dtype)` -> a zeroed 1-D tensor, in shared memory where peers read it."""


def allocated(allocate: Allocate, numel: int, dtype: torch.dtype) -> Tensor:
    """As `allocate`, which has no memory to give for nothing: a frozen shard's gradient, parameters of 0 elements."""
    return allocate(numel, dtype) if numel else torch.empty(0, dtype=dtype)


def in_private_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """An `Allocate` whose tensors no other member can read."""
    return torch.zeros(numel, dtype=dtype)


def view_of(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape that begins there in a flat."""
    numel = torch.Size(shape).numel()
    return flat[start : start + numel].view(shape)


def in_own_storage(view: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage is no larger, so that a file of it is no larger either."""
    if not view.numel():
        return torch.empty_like(view)
    return torch.frombuffer(view.reshape(-1).view(torch.uint8).numpy(), dtype=view.dtype).view(view.shape)


def has_masters(layout: Layout) -> bool:
    """Whether some parameters have less precision than what the optimizer works on."""
    return any(shard.master_dtype != shard.dtype for shard in layout.shards)


def frozen_shards(layout: Layout) -> frozenset[int]:
    """Shards that get no gradients: nobody adds any for them."""
    return frozenset(shard.index for shard in layout.shards if not shard.lanes)


class FlatBuffers:
    """Flats, given as index -> (elements, name of the dtype), as slices of one allocation per dtype."""

    def __init__(self, flats: Mapping[int, tuple[int, str]], allocate: Allocate) -> None:
        self.whole: dict[str, Tensor] = {}
        self.flats: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(dtype for _, dtype in flats.values()):
            same = {index: numel for index, (numel, its) in flats.items() if its == dtype}
            buffer = self.whole[dtype] = allocated(allocate, sum(same.values()), getattr(torch, dtype))
            self.flats.update(zip(same, torch.split(buffer, list(same.values())), strict=True))

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.whole.values())


class ParameterMemory:
    """A layout's own flats: slices of one allocation per dtype, or `apart`, each in one of its own, which can go."""

    def __init__(self, layout: Layout, allocate: Allocate, *, apart: bool) -> None:
        own = [flat for flat in layout.flats if flat.alias_of is None]
        dtypes = list(dict.fromkeys(flat.dtype for flat in own))
        # In this order digests are made, wherever flats lie.
        own.sort(key=lambda flat: dtypes.index(flat.dtype))
        self._sizes = {flat.index: (flat.numel, flat.dtype) for flat in own}
        self._allocate = allocate
        self.whole: dict[str, Tensor] = {}
        """What flats are slices of, by name."""
        self.flats: dict[int, Tensor] = {}
        """Those that are there."""
        if apart:
            # Zeros between parameters are part of digests, so nothing here is NaN yet.
            self.flats = {index: self._allocated(index) for index in self._sizes}
            self.whole = _named(self.flats)
        else:
            buffers = FlatBuffers(self._sizes, allocate)
            self.whole, self.flats = buffers.whole, buffers.flats

    def flat(self, index: int) -> Tensor | None:
        """None: it is absent."""
        return self.flats.get(index)

    def hold(self, flats: Collection[int]) -> None:
        """Have these flats and no others; only where they lie apart. Those that come are NaN throughout."""
        # Replaced as a whole: the main thread looks at them while the engine's thread is here.
        kept = {index: flat for index, flat in self.flats.items() if index in flats}
        self.flats, self.whole = kept, _named(kept)
        came = {index: self._allocated(index).fill_(torch.nan) for index in flats if index not in kept}
        found = {index: {**kept, **came}[index] for index in self._sizes if index in flats}
        self.flats, self.whole = found, _named(found)

    def _allocated(self, index: int) -> Tensor:
        numel, dtype = self._sizes[index]
        return allocated(self._allocate, numel, getattr(torch, dtype))


def _named(flats: Mapping[int, Tensor]) -> dict[str, Tensor]:
    return {flat_name(index): flat for index, flat in flats.items()}


def flat_name(index: int) -> str:
    """Where flats lie apart."""
    return f"flat {index}"
