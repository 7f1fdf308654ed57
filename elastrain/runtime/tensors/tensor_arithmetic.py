"""The ledger's arithmetic with tensors: slots, sums, norms, updates, digests, and what they take of memory.

What belongs to the bits stands here: orders of operations, where masters are rounded, how gradients are scaled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from elastrain.job.layout import Layout
from elastrain.job.values import Record
from elastrain.runtime.durable.stored_initial import StoredInitial
from elastrain.runtime.model import statistics
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.flats import Allocate, allocated
from elastrain.runtime.model.gradients import GradientSlot
from elastrain.runtime.model.optimizer import Hyper, PieceOptimizer
from elastrain.snapshot.digest import checksum
from elastrain.snapshot.shard_state import ShardState


class TensorArithmetic:
    """Slots and buffers are made with `allocate`, in shared memory where peers read them."""

    def __init__(
        self,
        *,
        layout: Layout,
        model: ModelState,
        optimizer: PieceOptimizer,
        allocate: Allocate,
        max_grad_norm: float | None,
    ) -> None:
        self.hyper: dict[int, Hyper] = {}
        """Step -> the optimizer's settings in it."""
        self.stored: StoredInitial | None = None
        """Where initial states come from; None: from the model's parameters."""
        self.buffers_bytes = 0
        self._layout = layout
        self._model = model
        self._optimizer = optimizer
        self._allocate = allocate
        self._max_grad_norm = max_grad_norm
        self._nothing = torch.empty(0)

    def new_slot(self) -> GradientSlot:
        return self._model.new_slot()

    def add_block(self, slot: GradientSlot, later: GradientSlot, block: int) -> None:
        slot.add(later, block)

    def lane(self, slot: GradientSlot, shard: int, lane: int) -> Tensor:
        """A frozen shard has no gradient; it takes part so that it is published like the others."""
        its = self._layout.shards[shard]
        return slot.lane(its, lane) if its.lanes else self._nothing

    def new_buffer(self, like: Tensor) -> Tensor:
        self.buffers_bytes += like.nbytes
        return allocated(self._allocate, like.numel(), like.dtype)

    def kind(self, tensor: Tensor) -> tuple[int, torch.dtype]:
        return tensor.numel(), tensor.dtype

    def add(self, shard: int, left: Tensor, right: Tensor, out: Tensor) -> None:
        if statistics.is_statistics(self._layout, shard):
            statistics.compose(left, right, out=out)
        else:
            torch.add(left, right, out=out)

    def copy(self, source: Tensor, out: Tensor) -> None:
        out.copy_(source)

    def square_norm(self, shard: int, total: Tensor) -> float:
        if statistics.is_statistics(self._layout, shard):
            return statistics.square_norm(total)
        return float(torch.linalg.vector_norm(total, dtype=torch.float64)) ** 2

    def checksum(self, tensor: Tensor) -> int:
        return checksum(tensor)

    def pack_checksums(self, checksums: Sequence[int]) -> Tensor:
        return torch.tensor([value - (1 << 63) for value in checksums], dtype=torch.int64)

    def unpack_checksums(self, packed: Tensor) -> list[int]:
        return [int(value) + (1 << 63) for value in packed.tolist()]

    def create(self, shard: int, *, bound: bool) -> ShardState:
        if self.stored is not None:
            state = self.stored.take(shard)
            if bound:
                self.bind(state)
            return state
        master = getattr(torch, self._layout.shards[shard].master_dtype)
        parameters = self.parameters(shard).to(master, copy=not bound)
        return self._optimizer.create(self._layout.shards[shard], parameters)

    def update(self, items: Sequence[tuple[ShardState, Tensor, tuple[int, ...]]], record: Record) -> None:
        """Scale, clip, update, in this order; a skipped step moves nothing but the version."""
        for state, _, _ in items:
            state.version = record.step
        todo = [(s, g, _touched(self._layout, masks)) for s, g, masks in items if self._layout.pieces[s.shard]]
        if todo and not record.skipped:
            factors = scale_and_clip(record, self._max_grad_norm)
            self._optimizer.apply(todo, hyper=self.hyper[record.step], factors=factors)
        for state, maps, _ in items:
            if statistics.is_statistics(self._layout, state.shard) and not record.skipped:
                statistics.apply(maps, state.parameters)

    def bind(self, state: ShardState) -> None:
        """Rounded where the model has less precision; else they share memory."""
        view = self.parameters(state.shard)
        if state.parameters.data_ptr() != view.data_ptr():
            self._model.take_parameters(state.shard, state.parameters)
            if view.dtype == state.parameters.dtype:
                state.parameters = view

    def unbind(self, state: ShardState) -> bool:
        if not self._model.has(self._layout.shards[state.shard]):
            return False
        if state.parameters.data_ptr() != self.parameters(state.shard).data_ptr():
            return False
        state.parameters = state.parameters.clone()
        return True

    def digest(self, state: ShardState) -> int:
        return state.checksum()

    def has_master(self, shard: int) -> bool:
        its = self._layout.shards[shard]
        return its.master_dtype != its.dtype

    def digest_published(self, shard: int, state: ShardState | None) -> int:
        """From the masters, rounded again: what the model computes with may have changed alone."""
        view = self.parameters(shard)
        return checksum(view if state is None else state.parameters.to(view.dtype))

    def parameters_bytes(self, shard: int) -> int:
        its = self._layout.shards[shard]
        return its.numel * getattr(torch, its.dtype).itemsize  # type: ignore[no-any-return]

    def parameters(self, shard: int) -> Tensor:
        return self._model.parameters_of(self._layout.shards[shard])

    def take_parameters(self, shard: int, published: Tensor) -> None:
        self._model.take_parameters(shard, published)

    def hold(self, blocks: Collection[int] | None, unused: list[Tensor] | None = None) -> None:
        if unused is not None:
            self.buffers_bytes -= sum(buffer.nbytes for buffer in unused)
            unused.clear()  # before anything comes: the caller has this list, too
            self._optimizer.let_go_of_scratch()
        if blocks is not None:
            if unused is not None:
                self._model.gradients.hold(())
            self._model.hold(blocks)

    def pack(self, state: ShardState) -> list[Tensor]:
        text, tensors = state.pack()
        head = state.checksum().to_bytes(8, "little") + text
        return [torch.frombuffer(bytearray(head), dtype=torch.uint8), *tensors]

    def unpack(self, payload: Sequence[Tensor]) -> tuple[ShardState, int]:
        meta, *tensors = payload
        told, text = bytes(meta[:8].tolist()), bytes(meta[8:].tolist())
        return ShardState.unpack(text, [tensor.clone() for tensor in tensors]), int.from_bytes(told, "little")


def _touched(layout: Layout, masks: Iterable[int]) -> frozenset[int]:
    leaves = [leaf for mask in masks for leaf in range(mask.bit_length()) if mask >> leaf & 1]
    return layout.touched_parameters(leaves)


def scale_and_clip(record: Record, max_grad_norm: float | None) -> tuple[float, ...]:
    """Factors of the summed gradient, to be applied one after another: one over weight and loss scale, then clipping.

    Clipping is that of torch.nn.utils.clip_grad_norm_: `max_norm / (norm + 1e-6)`, never above 1.
    """
    scale = 1.0 / (record.contribution.weight * record.scaler.scale)
    if max_grad_norm is None:
        return (scale,)
    return (scale, min(1.0, max_grad_norm / (grad_norm(record) + 1e-6)))


def grad_norm(record: Record) -> float:
    """Global norm of the averaged gradient."""
    weight = record.contribution.weight * record.scaler.scale
    return math.sqrt(record.square_norm) / weight if weight else math.nan
