"""The buffer book's arithmetic with tensors: slots, sums, norms, updates and digests, and the memory of its buffers.

Everything that decides the bits is here: the order of operations, the rounding of masters, the scaling of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from elastrain.job.layout import Layout
from elastrain.job.values import Record
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import allocated, copy_plainly
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.optimizer import Hyper, PieceOptimizer
from elastrain.snapshot.digest import checksum
from elastrain.snapshot.shard_state import ShardState


def pack_checksums(checksums: Sequence[int]) -> Tensor:
    """Return checksums as a tensor of int64, shifted by 2**63 because they are unsigned."""
    return torch.tensor([value - (1 << 63) for value in checksums], dtype=torch.int64)


def unpack_checksums(packed: Tensor) -> list[int]:
    """Return the checksums from a tensor of `pack_checksums`."""
    return [int(value) + (1 << 63) for value in packed.tolist()]


class TensorArithmetic:
    """The arithmetic of a worker on its model and optimizer. `memory` has its buffers, and what peers read."""

    pack_checksums = staticmethod(pack_checksums)
    unpack_checksums = staticmethod(unpack_checksums)

    def __init__(
        self,
        *,
        layout: Layout,
        model: ModelState,
        optimizer: PieceOptimizer,
        memory: TensorMemory,
        max_grad_norm: float | None,
    ) -> None:
        self.hyper: dict[int, Hyper] = {}
        """Step -> its hyperparameters."""
        self.stored: StoredInitial | None = None
        """Checkpoint that provides initial states. None: they are made from the model's parameters."""
        self.buffers_bytes = 0
        self._layout = layout
        self._model = model
        self._optimizer = optimizer
        self._memory = memory
        self.is_far = memory.is_far
        self.taken_piece = memory.taken_piece
        self._max_grad_norm = max_grad_norm
        self._nothing = torch.empty(0)

    def new_slot(self) -> GradientSlot:
        """Return a new slot for all gradients."""
        return self._model.new_slot()

    def add_block(self, slot: GradientSlot, later: GradientSlot, block: int) -> None:
        """Add the gradients of a later run for one block to the slot, in place."""
        slot.add(later, block)

    def lane(self, slot: GradientSlot, shard: int, lane: int) -> Tensor:
        """Return a shard's part of the slot, a view. It is empty for a frozen shard, which is published like others."""
        its = self._layout.shards[shard]
        return slot.lane(its, lane) if its.lanes else self._nothing

    def new_buffer(self, like: Tensor) -> Tensor:
        """Return a new 1-D buffer with the size and dtype of `like`."""
        self.buffers_bytes += like.nbytes
        return allocated(self._memory.empty, like.numel(), like.dtype)

    def new_kept(self, like: Tensor) -> Tensor | None:
        """Return new shared host memory for a gradient that a backup keeps, or None on the host."""
        return None if self._memory.port.is_host else allocated(self._memory.shared, like.numel(), like.dtype)

    def kind(self, tensor: Tensor) -> tuple[int, torch.dtype]:
        """Return size and dtype. Buffers of one kind can replace each other."""
        return tensor.numel(), tensor.dtype

    def add(self, shard: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Write `left + right`, or the composition of maps of running statistics, to `out`."""
        if statistics.is_statistics(self._layout, shard):
            statistics.compose(left, right, out=out)
        else:
            torch.add(left, right, out=out)

    def copy(self, source: Tensor, out: Tensor) -> None:
        """Copy `source` to `out`."""
        self._memory.copy(source, out)

    def square_norm(self, shard: int, total: Tensor) -> float:
        """Return the squared norm of a shard's gradient, computed in float64."""
        if statistics.is_statistics(self._layout, shard):
            return statistics.square_norm(total)
        return float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2

    def checksum(self, tensor: Tensor) -> int:
        """Return a cheap checksum of the tensor's bits."""
        return self._memory.checksum(tensor)

    def create(self, shard: int, *, bound: bool) -> ShardState:
        """Return the initial state of a shard. If `bound`, its parameters share memory with the model's if possible."""
        if self.stored is not None:
            state = self.stored.take(shard)
            if bound:
                state = state.on(self._memory.port.device)
                self.bind(state)
            return state
        master = getattr(torch, self._layout.shards[shard].master_dtype)
        parameters = self.parameters(shard).to(master, copy=not bound)
        return self._optimizer.create(self._layout.shards[shard], parameters)

    def update(self, items: Sequence[tuple[ShardState, Tensor, tuple[int, ...]]], record: Record) -> None:
        """Scale and clip gradients, then update the states in place. A skipped step changes the version only."""
        for state, _, _ in items:
            state.version = record.step
        todo = [(s, g, _touched(self._layout, masks)) for s, g, masks in items if self._layout.pieces[s.shard]]
        if todo and not record.skipped:
            factors = scale_and_clip(record, self._max_grad_norm)
            self._optimizer.apply(todo, hyper=self.hyper[record.step], factors=factors)
        for state, maps, _ in items:
            if statistics.is_statistics(self._layout, state.shard) and not record.skipped:
                statistics.apply(self._memory.taken_in(maps) if self.is_far(maps) else maps, state.parameters)

    def bind(self, state: ShardState, *, is_new: bool = False) -> None:
        """Copy a state's parameters into the model. They share memory from then on if their dtypes are equal.

        On a device, those of a new primary are copied only if other bits are there. Otherwise the loop may have gone on
        with them, and its stream reads them without a word to the engine's.
        """
        view = self.parameters(state.shard)
        if state.parameters.data_ptr() != view.data_ptr():
            copy = _copy_if_other if is_new and not self._memory.port.is_host else copy_plainly
            self._model.take_parameters(state.shard, state.parameters, copy)
            if view.dtype == state.parameters.dtype:
                state.parameters = view

    def show(self, state: ShardState) -> None:
        """Copy a state's parameters into the model, as if they had been published."""
        # Masters are rounded, as they are where they are published.
        self.take_parameters(state.shard, state.parameters.to(self.parameters(state.shard).dtype))

    def unbind(self, state: ShardState) -> bool:
        """Give the state its own memory for parameters. Returns False if it has that already."""
        if not self._model.has(self._layout.shards[state.shard]):
            return False
        if state.parameters.data_ptr() != self.parameters(state.shard).data_ptr():
            return False
        state.parameters = state.parameters.clone()
        return True

    def digest(self, state: ShardState) -> int:
        """Return the checksum of a state, or its digest in a job on a device."""
        return state.checksum() if self._memory.port.is_host else state.digest()

    def has_master(self, shard: int) -> bool:
        """Return True if the shard's state has a higher precision than the model's parameters."""
        its = self._layout.shards[shard]
        return its.master_dtype != its.dtype

    def digest_published(self, shard: int, state: ShardState | None) -> int:
        """Return the checksum of a shard's parameters as published, or, without a state, of the model's own.

        With a state the masters are rounded again, because the model's own memory may be damaged.
        """
        view = self.parameters(shard)
        return checksum(view if state is None else state.parameters.to(view.dtype))

    def parameters_bytes(self, shard: int) -> int:
        """Return the bytes of a shard's parameters in the model."""
        its = self._layout.shards[shard]
        return its.numel * getattr(torch, its.dtype).itemsize  # type: ignore[no-any-return]

    def parameters(self, shard: int, part: tuple[int, int] | None = None) -> Tensor:
        """Return a view of a shard's parameters in the model, or of piece `part[0]` of `part[1]`."""
        return _piece(self._model.parameters_of(self._layout.shards[shard]), part or (0, 1))

    def take_parameters(self, shard: int, published: Tensor, part: tuple[int, int] | None = None) -> None:
        """Copy published parameters into the model. With a `part` they still count as absent."""
        if part is None:
            self._model.take_parameters(shard, published, self._memory.copy)
        else:
            self._memory.copy(published, self.parameters(shard, part))

    def hold(self, blocks: Collection[int] | None, unused: list[Tensor] | None = None) -> None:
        """Keep exactly the parameters that these blocks read; None: keep those that are here.

        `unused`: buffers to free before new memory is allocated; the list is emptied.
        """
        if unused is not None:
            self.buffers_bytes -= sum(buffer.nbytes for buffer in unused)
            unused.clear()  # in place, because the caller has this list, too
            self._optimizer.let_go_of_scratch()
        if blocks is not None:
            if unused is not None:
                self._model.gradients.hold(())
            self._model.hold(blocks)

    def pack(self, state: ShardState, digest: int | None = None, part: tuple[int, int] | None = None) -> list[Tensor]:
        """Return a state as tensors for a message: a head (checksum and description), then its own tensors.

        Args:
            state: The state.
            digest: Its checksum, if it is known; else it is computed.
            part: Number of a piece, and number of pieces. The head goes with the first piece. None: the whole state.
        """
        text, tensors = state.pack()
        if part is not None:
            tensors = [_piece(tensor, part) for tensor in tensors]
        if part is not None and part[0]:
            return [self._nothing, *tensors]
        head = (self.digest(state) if digest is None else digest).to_bytes(8, "little") + text
        return [torch.frombuffer(bytearray(head), dtype=torch.uint8), *tensors]

    def unpack(self, *pieces: Sequence[Tensor], in_place: bool = False) -> tuple[ShardState, int]:
        """Return the state, in new memory unless `in_place` on the host, and the checksum that `pack` computed."""
        head, *columns = zip(*pieces, strict=True)
        told, text = bytes(head[0][:8].tolist()), bytes(head[0][8:].tolist())
        take = self._memory.taken_in if not (in_place and self._memory.port.is_host) else lambda tensor: tensor
        tensors = [take(column[0]) if len(pieces) == 1 else torch.cat(column) for column in columns]
        return ShardState.unpack(text, tensors), int.from_bytes(told, "little")


def _piece(whole: Tensor, part: tuple[int, int]) -> Tensor:
    """Return piece `part[0]` of `part[1]` of a 1-D tensor, without a copy."""
    number, count = part
    return whole[whole.numel() * number // count : whole.numel() * (number + 1) // count]


def _copy_if_other(source: Tensor, out: Tensor) -> None:
    rounded = source.to(out.dtype)
    if not torch.equal(rounded.view(torch.uint8), out.view(torch.uint8)):
        out.copy_(rounded)


def _touched(layout: Layout, masks: Iterable[int]) -> frozenset[int]:
    leaves = [leaf for mask in masks for leaf in range(mask.bit_length()) if mask >> leaf & 1]
    return layout.touched_parameters(leaves)


def scale_and_clip(record: Record, max_grad_norm: float | None) -> tuple[float, ...]:
    """Return the factors of the summed gradient in their order: 1 / (weight · loss scale), then clipping, if any.

    The factor for clipping is that of torch.nn.utils.clip_grad_norm_: `max_norm / (norm + 1e-6)`, at most 1.
    """
    scale = 1.0 / (record.contribution.weight * record.scaler.scale)
    if max_grad_norm is None:
        return (scale,)
    return (scale, min(1.0, max_grad_norm / (grad_norm(record) + 1e-6)))


def grad_norm(record: Record) -> float:
    """Return the global norm of the averaged gradient, or NaN if the weight is 0."""
    weight = record.contribution.weight * record.scaler.scale
    return math.sqrt(record.square_norm) / weight if weight else math.nan
