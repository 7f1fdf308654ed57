"""Flat buffers: the tensors behind a layout's flats, as slices of few allocations.

`Completion` counts the leaves that fire in the last backward of a run, and reports blocks with final gradients. It
knows indices only, no tensors. `HeldBlocks` knows which blocks have memory and values on this member.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.job.layout import Layout
from elastrain.pipeline.stubs.placeholders import ON_RANK_0

Allocate = Callable[[int, torch.dtype], Tensor]
"""A function `(numel, dtype)` -> zeroed 1-D tensor, which lies in shared memory if peers read it."""

Copy = Callable[[Tensor, Tensor], None]
"""A function `(source, out)` that copies the numbers of one tensor to another."""


def copy_plainly(source: Tensor, out: Tensor) -> None:
    """Copy as torch does; a `Copy`."""
    out.copy_(source)


def allocated(allocate: Allocate, numel: int, dtype: torch.dtype) -> Tensor:
    """Call `allocate`, or return an empty tensor for 0 elements, which `allocate` does not accept."""
    return allocate(numel, dtype) if numel else torch.empty(0, dtype=dtype, device="cpu")


def in_private_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in the host's memory that no other member can read; an `Allocate`."""
    return torch.zeros(numel, dtype=dtype, device="cpu")


def view_of(flat: Tensor, start: int, shape: tuple[int, ...]) -> Tensor:
    """Return a view of this shape that begins at element `start` of a flat."""
    numel = torch.Size(shape).numel()
    return flat[start : start + numel].view(shape)


def in_own_storage(view: Tensor) -> Tensor:
    """Return a tensor over the same memory whose storage ends with it, so that a saved file is no larger.

    A device's memory has one storage, which saved files contain once.
    """
    if not view.numel():
        return torch.empty_like(view)
    if view.device.type != "cpu":
        return view
    return torch.frombuffer(view.reshape(-1).view(torch.uint8).numpy(), dtype=view.dtype).view(view.shape)


def has_masters(layout: Layout) -> bool:
    """Return True if some parameters have less precision than the masters that the optimizer updates."""
    return any(shard.master_dtype != shard.dtype for shard in layout.shards)


def frozen_shards(layout: Layout) -> frozenset[int]:
    """Return the shards that get no gradients."""
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
        """Bytes of all allocations."""
        return sum(buffer.nbytes for buffer in self.whole.values())


class ParameterMemory:
    """The parameter flats of a layout: slices of one allocation per dtype or, if `apart`, one allocation for each."""

    def __init__(self, layout: Layout, allocate: Allocate, *, apart: bool) -> None:
        own = [flat for flat in layout.flats if flat.alias_of is None]
        dtypes = list(dict.fromkeys(flat.dtype for flat in own))
        # Digests go over the flats in this order, whether they lie apart or not.
        own.sort(key=lambda flat: dtypes.index(flat.dtype))
        self._sizes = {flat.index: (flat.numel, flat.dtype) for flat in own}
        self._allocate = allocate
        self.whole: dict[str, Tensor] = {}
        """The allocations of which flats are slices, by name."""
        self.flats: dict[int, Tensor] = {}
        """The flats that this member has, by index."""
        if apart:
            # Not filled with NaN yet: the gaps between parameters must be zero, because digests include them.
            self.flats = {index: self._allocated(index) for index in self._sizes}
            self.whole = _named(self.flats)
        else:
            buffers = FlatBuffers(self._sizes, allocate)
            self.whole, self.flats = buffers.whole, buffers.flats

    def flat(self, index: int) -> Tensor | None:
        """Return a flat, or None if it is absent."""
        return self.flats.get(index)

    def hold(self, flats: Collection[int]) -> None:
        """Keep exactly these flats. Only for flats that lie apart. New ones are filled with NaN."""
        # Both dicts are replaced as a whole, because the main thread reads them while the engine's thread is here.
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
    """Return the name of a flat's allocation if flats lie apart."""
    return f"flat {index}"


OnBlockDone = Callable[[int, frozenset[int]], None]
"""A callback `(block, its leaves that got a gradient in this run)`: the block's gradients in the slot are final."""


class Completion:
    """A counter of the leaves of each block during one backward. It reports a block once all of its leaves have fired.

    A leaf fires once per backward, after its full accumulation; only a reentrant checkpoint fires it once per inner
    backward. The first armed backward of a block finds out whether that happens, and reports the block at its end.
    Blocks with such checkpoints are always reported at the end.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._leaves = [frozenset(leaf.index for leaf in layout.leaves_of(b)) for b in range(len(layout.blocks))]
        self._block_of = {leaf: block for block, leaves in enumerate(self._leaves) for leaf in leaves}
        self._learned: set[int] = set()
        self._late: set[int] = set()
        self._report: OnBlockDone | None = None
        self._blocks: Collection[int] = range(len(layout.blocks))
        """The blocks that this backward goes through."""
        self._fired: set[int] = set()
        self._left: list[int] = []
        self._reported: set[int] = set()

    def arm(self, report: OnBlockDone, blocks: Collection[int] | None = None) -> None:
        """Start to count for one backward. `blocks`: the blocks that it goes through, ascending, or None for all."""
        self._report = report
        self._blocks = range(len(self._leaves)) if blocks is None else blocks
        self._fired.clear()
        self._reported.clear()
        self._left = [len(leaves) for leaves in self._leaves]

    def disarm(self) -> None:
        """Stop counting and reporting."""
        self._report = None

    def landed(self, leaf: int, touched: set[int]) -> None:
        """Count a leaf that fired. `touched`: all leaves that got a gradient in this run."""
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
        """Raise ConfigError for a leaf that got a gradient although this backward does not go through its block."""
        # No member would add this gradient: the member that computes the block in this run does not have it.
        block = self._layout.blocks[self._block_of[leaf]]
        raise ConfigError(
            f"block {block!r} got a gradient on a member that computes other blocks: its parameters are used outside "
            "of its forward; let the block itself use them"
        )

    def finish(self, touched: set[int]) -> None:
        """Report the blocks that were not reported yet, and stop counting. Raises RuntimeError without `arm`."""
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
    """The blocks that this member has. Tracks which values are still to come, and if the model stays partial."""

    def __init__(self, layout: Layout, readers: Mapping[int, Collection[int]], memory: ParameterMemory) -> None:
        """Start with all blocks present. `readers`: by flat, the blocks that read it."""
        self._layout, self._readers, self._memory = layout, readers, memory
        self._awaited: set[int] = set()
        """Shards of new blocks whose values have not been written yet."""
        self.are_left_partial = False
        """True if the loop is over and some blocks are absent for good."""
        self.fetch: Callable[[], Mapping[str, Tensor]] | None = None
        """Returns all parameters by name for `state_dict` in the loop, or raises ConfigError. None outside of it."""
        self.lent: Mapping[str, Tensor] | None = None
        """Parameters by name for the `state_dict` that is being made."""
        self.shown: set[int] = set()
        """Flats of blocks that are warmed up now, although their values may not have come."""
        self.mark: Callable[[], None] = lambda: None
        """Marks the parameters of the model as absent or present."""
        self._lock = threading.Lock()
        """Held while parameters are marked as absent or present."""

    def hold(self, flats: Collection[int]) -> None:
        """Keep memory for exactly these flats. New ones have no values yet."""
        before, shards = set(self._memory.flats), self._layout.shards
        # Before the memory is made, because the main thread may ask at any moment which values are here.
        new = {s.index for s in shards if s.flat in flats and s.flat not in before and s.numel}
        self._awaited = new | {shard for shard in self._awaited if shards[shard].flat in flats}
        self._memory.hold(flats)

    def flats_of(self, blocks: Collection[int]) -> set[int]:
        """Return the flats that these blocks read."""
        return {flat for flat, readers in self._readers.items() if any(block in blocks for block in readers)}

    def show(self, blocks: Collection[int]) -> None:
        """Mark the parameters of these blocks as present, even without values, until the next call."""
        # A compiler makes other code for parameters that are marked as absent.
        self.shown = self.flats_of(blocks)
        self.mark()

    @contextmanager
    def marking(self, here: Collection[int] | None) -> Iterator[set[int]]:
        """Return a context in which parameters are marked. It gives the flats to mark as present: `here` and `shown`.

        here: None for the flats whose values have come.
        """
        # Both threads mark parameters. The last one knows what the other one has changed.
        with self._lock:
            yield {*(self._memory.flats.keys() - self.coming() if here is None else here), *self.shown}

    def came(self, shard: int) -> None:
        """Note that the values of a shard were written."""
        self._awaited.discard(shard)

    def coming(self) -> set[int]:
        """Return the flats that have memory but not all values yet. Any thread may call it."""
        return {self._layout.shards[shard].flat for shard in tuple(self._awaited)}

    def has(self, block: int) -> bool:
        """Return True if this member has memory and values of everything that the block reads."""
        here = self._memory.flats.keys() - self.coming()
        return all(flat in here for flat, readers in self._readers.items() if block in readers)

    def missing(self) -> str | None:
        """Return the first block that is absent or has no values yet, or None if the whole model is here."""
        # `has` is called once per block, because values may arrive from another thread meanwhile.
        return next((block for number, block in enumerate(self._layout.blocks) if not self.has(number)), None)

    def leave(self) -> bool:
        """Note that the loop is over and no more blocks come. Returns True if that leaves the model partial."""
        self.are_left_partial = self.missing() is not None
        return self.are_left_partial

    def check_are_all(self, what: str) -> None:
        """Raise ConfigError, naming `what`, if a block is absent or has no values yet."""
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
