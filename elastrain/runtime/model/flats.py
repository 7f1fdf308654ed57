"""Flat buffers: the tensors behind a layout's flats, as slices of few allocations.

When the gradients of a block are final: counts the leaves that fire during the last backward of a run.

Knows indices only, no tensors.

Which blocks of a model are on this member: those whose parameters have memory here, and values in it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NoReturn

import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout
from elastrain.pipeline.stubs.placeholders import ON_RANK_0

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


OnBlockDone = Callable[[int, frozenset[int]], None]
"""`(block, leaves of it that got a gradient in this run)`: the block's gradients in the slot are final."""


class Completion:
    """Counts the leaves of each block during one backward and reports a block when all have fired.

    A leaf fires once per backward, after its full accumulation, however often it is used; only a reentrant checkpoint
    fires it once per inner backward. A block's first armed backward therefore only learns whether it does that, and
    the block is reported at the end; later, blocks that do always wait for the end.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._leaves = [frozenset(leaf.index for leaf in layout.leaves_of(b)) for b in range(len(layout.blocks))]
        self._block_of = {leaf: block for block, leaves in enumerate(self._leaves) for leaf in leaves}
        self._learned: set[int] = set()
        self._late: set[int] = set()
        self._report: OnBlockDone | None = None
        self._blocks: Collection[int] = range(len(layout.blocks))
        """Those that this backward goes through."""
        self._fired: set[int] = set()
        self._left: list[int] = []
        self._reported: set[int] = set()

    def arm(self, report: OnBlockDone, blocks: Collection[int] | None = None) -> None:
        """`blocks`: those that the backward goes through, in ascending order; None: all."""
        self._report = report
        self._blocks = range(len(self._leaves)) if blocks is None else blocks
        self._fired.clear()
        self._reported.clear()
        self._left = [len(leaves) for leaves in self._leaves]

    def disarm(self) -> None:
        self._report = None

    def landed(self, leaf: int, touched: set[int]) -> None:
        if self._report is None:
            return
        block = self._block_of[leaf]
        if block not in self._blocks:
            self.refuse(leaf)
        if block in self._reported:
            raise ConfigError(
                f"block {self._layout.blocks[block]!r} got a gradient after its last one: "
                "it is entered several times under a reentrant checkpoint; use checkpoint(…, use_reentrant=False)"
            )
        if leaf in self._fired:
            self._late.add(block)
            return
        self._fired.add(leaf)
        self._left[block] -= 1
        if not self._left[block] and block in self._learned and block not in self._late:
            self._done(block, touched)

    def refuse(self, leaf: int) -> NoReturn:
        """A leaf of a block that this backward does not go through has got a gradient: raises ConfigError."""
        # Nobody would add it up: in another member's gradients of this run it is missing.
        block = self._layout.blocks[self._block_of[leaf]]
        raise ConfigError(
            f"block {block!r} got a gradient on a member that computes other blocks: its parameters are used outside "
            "of its forward; let the block itself use them"
        )

    def finish(self, touched: set[int]) -> None:
        if self._report is None:
            raise RuntimeError("finish() without arm()")
        for block in self._blocks:
            if block not in self._reported:
                self._done(block, touched)
        self._learned.update(self._blocks)
        self._report = None

    def _done(self, block: int, touched: set[int]) -> None:
        assert self._report is not None
        self._reported.add(block)
        self._report(block, self._leaves[block] & touched)


class HeldBlocks:
    """Owns which values are still to come, and whether the loop has left the model partial."""

    def __init__(self, layout: Layout, readers: Mapping[int, Collection[int]], memory: ParameterMemory) -> None:
        """`readers`: by flat, the blocks that read it."""
        self._layout, self._readers, self._memory = layout, readers, memory
        self._awaited: set[int] = set()
        """Shards of blocks that came, and have no values yet."""
        self.are_left_partial = False
        """The loop is over, and no more blocks come, though not all are here."""

    def hold(self, flats: Collection[int]) -> None:
        """Have memory for these flats and no others; what is new there has no values yet."""
        before, shards = set(self._memory.flats), self._layout.shards
        # First: the main thread may ask at any moment what is here.
        new = {s.index for s in shards if s.flat in flats and s.flat not in before and s.numel}
        self._awaited = new | {shard for shard in self._awaited if shards[shard].flat in flats}
        self._memory.hold(flats)

    def came(self, shard: int) -> None:
        """The shard's values are written."""
        self._awaited.discard(shard)

    def coming(self) -> set[int]:
        """Flats with memory here whose values are still to come. For any thread."""
        return {self._layout.shards[shard].flat for shard in tuple(self._awaited)}

    def has(self, block: int) -> bool:
        """Whether all that the block reads is here: its memory, and its values."""
        here = self._memory.flats.keys() - self.coming()
        return all(flat in here for flat, readers in self._readers.items() if block in readers)

    def missing(self) -> str | None:
        """Name the first block that is absent, or has no values yet; None where the whole model is here."""
        # Asked once per block: meanwhile values may come from another thread.
        return next((block for number, block in enumerate(self._layout.blocks) if not self.has(number)), None)

    def leave(self) -> bool:
        """The loop is over, and no more blocks come. Returns whether that leaves the model partial."""
        self.are_left_partial = self.missing() is not None
        return self.are_left_partial

    def check_are_all(self, what: str) -> None:
        """Raises ConfigError, naming `what`, where a block is absent, or has no values yet."""
        missing = self.missing()
        if missing is None:
            return
        if self.are_left_partial:
            raise ConfigError(f"{what} needs all parameters: block {missing!r} is not on this member, {ON_RANK_0}")
        raise ConfigError(
            f"{what} needs all parameters, and this member of a pipeline does not have block {missing!r} now: use it "
            "behind the loop over job.steps(…), where rank 0 has all blocks, and every member that has room for them; "
            "in the loop there are step.loss and step.grad_norm, and job.checkpoint() writes everything"
        )
