"""Gradient slots: copies of the gradients, into which a backward accumulates, and the memory that they are made of.

If members hold some blocks each, a slot has memory for the blocks of its run only, and a free slot has none.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from elastrain.device import DeviceEvent, device_of
from elastrain.job.layout import STATISTICS, Layout, Shard
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flats import Allocate, FlatBuffers, view_of
from elastrain.snapshot.digest import combine, digest_later


class GradientPart:
    """The gradients of some blocks, one allocation per dtype."""

    def __init__(self, layout: Layout, blocks: Collection[int], allocate: Allocate) -> None:
        mine = {flat.index: flat for flat in layout.flats if flat.folded and flat.block in blocks}
        self.buffers = FlatBuffers({i: (flat.folded_numel, flat.master_dtype) for i, flat in mine.items()}, allocate)
        flats = self.buffers.flats
        self.port = device_of(next((flat.device for flat in flats.values() if flat.numel()), torch.device("cpu")))
        self.views: dict[int, Tensor] = {
            leaf.index: view_of(flats[leaf.flat], leaf.start, layout.parameters[leaf.parameter].shape)
            for leaf in layout.leaves
            if leaf.flat in mine and mine[leaf.flat].trained
        }
        self.statistics: dict[int, Tensor] = {
            leaf.index: flats[leaf.flat][2 * leaf.start : 2 * (leaf.start + leaf.numel)]
            for leaf in layout.leaves
            if leaf.flat in mine and mine[leaf.flat].group == STATISTICS
        }
        self._maps = [flats[i] for i, flat in mine.items() if flat.group == STATISTICS]
        # Zeroed once: the gaps between leaves are never written, and digests include them.
        for buffer in self.buffers.whole.values():
            buffer.zero_()

    def begin_run(self) -> None:
        """Reset the maps of running statistics. Gradients need no reset: the first one replaces the old content."""
        for maps in self._maps:
            statistics.clear(maps)


class GradientMemory:
    """The memory of slots: one part per slot for the whole model or, if `apart`, one per block. Thread-safe."""

    def __init__(self, layout: Layout, allocate: Allocate, *, apart: bool = False) -> None:
        self.layout = layout
        self.apart = apart
        self.nbytes = 0
        """Bytes of all parts, including free ones."""
        blocks = tuple(range(len(layout.blocks)))
        self._groups = tuple((block,) for block in blocks) if apart else (blocks,)
        self._held: Collection[int] = blocks
        self._allocate = allocate
        self._free: list[list[tuple[GradientPart, DeviceEvent]]] = [[] for _ in self._groups]
        """Parts by group, each with the event behind its last use. Another stream may use it next."""
        self._lock = threading.Lock()

    @property
    def copy_bytes(self) -> int:
        """Bytes of one copy of all gradients."""
        return sum(self.bytes_of(block) for block in range(len(self.layout.blocks)))

    def bytes_of(self, block: int) -> int:
        """Return the bytes of one copy of a block's gradients."""
        folded = [flat for flat in self.layout.flats if flat.folded and flat.block == block]
        return sum(flat.folded_numel * getattr(torch, flat.master_dtype).itemsize for flat in folded)

    def group_of(self, block: int) -> int:
        """Return the index of the part that contains a block."""
        return block if self.apart else 0

    def groups_of(self, blocks: Iterable[int] | None) -> list[int]:
        """Return the indices of the parts that contain these blocks (None: all blocks), ascending."""
        found = range(len(self._groups)) if blocks is None else sorted({self.group_of(block) for block in blocks})
        return list(found)

    def take(self, group: int) -> GradientPart:
        """Return a free or new part, with arbitrary content. Raises the errors of `allocate`."""
        with self._lock:
            free = self._free[group].pop() if self._free[group] else None
        if free is not None:
            part, used = free
            used.wait()
            return part
        part = GradientPart(self.layout, self._groups[group], self._allocate)
        with self._lock:
            self.nbytes += part.buffers.nbytes
        return part

    def give_back(self, group: int, part: GradientPart) -> None:
        """Keep a part for the next run, or free its memory if its block is no longer held."""
        with self._lock:
            if not self.apart or group in self._held:
                self._free[group].append((part, part.port.record()))
            else:
                self.nbytes -= part.buffers.nbytes

    def forget(self, part: GradientPart) -> None:
        """Stop counting a part that no slot has any more."""
        with self._lock:
            self.nbytes -= part.buffers.nbytes

    def hold(self, blocks: Collection[int]) -> None:
        """Keep free parts of these blocks only, and free the memory of all others."""
        with self._lock:
            self._held = frozenset(blocks)
            for group in range(len(self._groups)):
                if group not in self._held:
                    self.nbytes -= sum(part.buffers.nbytes for part, _ in self._free[group])
                    self._free[group].clear()


class GradientSlot:
    """A copy of the gradients of some blocks, with the set of leaves that got one since the run began.

    Gradients of half precision are summed in float32: each micro-batch's is converted before it is added. Nothing is
    zeroed before a run: the first gradient overwrites its leaf, and `settle` zeroes the leaves that got none.
    """

    def __init__(self, memory: GradientMemory) -> None:
        self._layout = memory.layout
        self._memory = memory
        self._parts: dict[int, GradientPart] = {}
        self.touched: set[int] = set()
        """Indices of the leaves into which a backward has accumulated."""
        self._settled: set[int] = set()
        """Blocks of the run that were settled. They are not written again: the engine's stream may be reading them."""
        self.last: int | None = None
        """The leaf that got a gradient last."""
        self.is_discarding = False
        """True while the gradients of the running backward are dropped."""
        self.views: dict[int, Tensor] = {}
        """The gradient of each leaf, a view."""
        self.statistics: dict[int, Tensor] = {}
        """The run's map of each running statistic, by leaf; see `elastrain.runtime.model.statistics`."""
        if not memory.apart:
            self.begin_run()

    def begin_run(self, blocks: Collection[int] | None = None) -> None:
        """Prepare the slot for the first micro-batch of a run. `blocks`: the blocks of the run, or None for all."""
        wanted = self._memory.groups_of(blocks)
        if wanted != list(self._parts):
            self.release()
            self._parts = {group: self._memory.take(group) for group in wanted}
            self.views = {leaf: view for part in self._parts.values() for leaf, view in part.views.items()}
            self.statistics = {leaf: maps for part in self._parts.values() for leaf, maps in part.statistics.items()}
        for part in self._parts.values():
            part.begin_run()
        self.touched.clear()
        self._settled.clear()

    def release(self) -> None:
        """Give the memory back for other slots if blocks come and go. The content is no longer needed."""
        if not self._memory.apart:
            return
        parts, self._parts = self._parts, {}
        self.views, self.statistics, self.last = {}, {}, None
        for group, part in parts.items():
            self._memory.give_back(group, part)

    def free(self) -> None:
        """Free the memory for good. The slot is not used again, and the device has finished all work on it."""
        parts, self._parts = self._parts, {}
        self.views, self.statistics, self.last = {}, {}, None
        for part in parts.values():
            self._memory.forget(part)

    def take(self, leaf: int, parameter: Tensor) -> bool:
        """Take the gradient that a backward left in `parameter.grad`. Returns False if it lies in other memory."""
        gradient = parameter.grad
        if leaf not in self.touched and gradient is not None and not gradient.requires_grad:
            self.land(leaf, gradient)
            parameter.grad = self.views[leaf]
        elif gradient is not self.views[leaf]:
            return False
        self.touched.add(leaf)
        self.last = leaf
        return True

    def put(self, leaf: int, gradient: Tensor) -> None:
        """Add a gradient to the leaf's, as autograd does for a leaf that has its own parameter."""
        if leaf in self.touched:
            self.views[leaf].add_(gradient)
        else:
            self.land(leaf, gradient)
        self.touched.add(leaf)
        self.last = leaf

    def land(self, leaf: int, gradient: Tensor) -> None:
        """Write the leaf's first gradient of the run. The bits are those of zeroing and adding, in one pass."""
        view = self.views[leaf]
        if gradient.layout is torch.strided:
            torch.add(gradient, 0.0, out=view)  # not a copy: 0 + -0 is 0
        else:
            view.zero_().add_(gradient)

    def settle(self, block: int) -> None:
        """Zero the leaves of a block that got no gradient in the run, so that its gradients are final."""
        for leaf in self._layout.leaves_of(block) if block not in self._settled else ():
            if leaf.index in self.views and leaf.index not in self.touched:
                self.views[leaf.index].zero_()
        self._settled.add(block)

    def lane(self, shard: Shard, lane: int) -> Tensor:
        """Return a 1-D view `(shard.numel,)` of the shard's part in one lane; twice as long for running statistics."""
        flat = self._layout.flats[shard.lanes[lane].flat]
        width = flat.folded_numel // flat.numel if flat.numel else 1
        return self._flat(flat.index)[width * shard.start : width * shard.stop]

    def digests(self) -> tuple[int, ...]:
        """Return a digest per block over its gradients and its touched leaves. All NaN values count as equal."""
        return tuple(digest() for digest in self.digests_later())

    def digest(self, block: int) -> int:
        """Return the digest of one block; see `digests`. Waits for the device."""
        return self.digest_later(block)()

    def digests_later(self) -> tuple[Callable[[], int], ...]:
        """Return functions that return the `digests` of the present content, and wait for the device."""
        for block in range(len(self._layout.blocks)):
            self.settle(block)
        return tuple(self.digest_later(block) for block in range(len(self._layout.blocks)))

    def digest_later(self, block: int) -> Callable[[], int]:
        """Return a function that returns the `digest` of the present content, and waits for the device."""
        touched = [leaf.index for leaf in self._layout.leaves_of(block) if leaf.index in self.touched]
        flats = (self._flat(f.index) for f in self._layout.flats if f.block == block and f.folded)
        digests = [digest_later(_one_nan(flat)) for flat in flats]
        return lambda: combine((*touched, *(each() for each in digests)))

    def add(self, later: GradientSlot, block: int) -> None:
        """Add the gradients of a later run for one block, in place."""
        for flat in self._layout.flats:
            if flat.block == block and flat.folded:
                mine, theirs = self._flat(flat.index), later._flat(flat.index)
                if flat.group == STATISTICS:
                    statistics.compose(mine, theirs, out=mine)
                else:
                    mine.add_(theirs)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the slot has now."""
        return sum(part.buffers.nbytes for part in self._parts.values())

    def _flat(self, index: int) -> Tensor:
        group = self._memory.group_of(self._layout.flats[index].block)
        return self._parts[group].buffers.flats[index]


def _one_nan(flat: Tensor) -> Tensor:
    """Return the tensor with equal bits for every NaN, because arithmetic does not promise which NaN it gives."""
    isnan = flat.isnan()
    # Only on the host is it free to look first.
    return flat.masked_fill(isnan, math.nan) if flat.device.type != "cpu" or bool(isnan.any()) else flat
