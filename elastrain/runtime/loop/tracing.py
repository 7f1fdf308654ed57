"""The tracing pass of a member, and the packing of boundary tensors.

`TracingRun` runs the body of the user's loop once with every block on fake tensors. It has no effect on the step: the
batch is loaded again for its own micro-batch, and random streams start again. `packed` and `unpacked` convert boundary
tensors to 1-D pieces of shared memory and back. Strides are kept, because kernels depend on them. A copy is never
written again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from elastrain.base.thread_status import Station
from elastrain.pipeline.graph import BlockGraph, CrossingTensor, check_stages
from elastrain.pipeline.stubs.fakes import shape_of
from elastrain.pipeline.stubs.trace import TracedModel, TracingPass
from elastrain.runtime.loop.computed_run import StepParts, load, went_by
from elastrain.runtime.model.flats import Allocate, allocated


class TracingRun:
    """An iterator over the one batch of the tracing pass. After one call of `backward`, `traced` has the result."""

    micro_batch = 0

    def __init__(self, step: int, parts: StepParts, model: nn.Module, stages: int) -> None:
        self.backward_is_due = False
        self.traced: TracedModel | None = None
        self._step, self._parts, self._stages = step, parts, stages
        self._pass = TracingPass(model, [block for block in parts.model.layout.blocks if block])

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts
        # The same batch on all members and newcomers: they compare graphs, and the data may decide which blocks run.
        data = load(parts, 0, self.micro_batch)
        parts.whereabouts.enter(Station.COMPUTING, self._step)
        parts.randomness.begin(0, self.micro_batch)
        self.backward_is_due = True
        try:
            self._pass.begin()
            yield data
        finally:
            self._pass.abandon()
        if self.backward_is_due:
            raise went_by(f"the first batch of step {self._step}")

    def backward(self, loss: Tensor, weight: float) -> None:
        """End the pass after the forward. Raises ConfigError if the model cannot be cut into the wanted stages."""
        self.backward_is_due = False
        self.traced = self._pass.finish()
        check_stages(self.traced.graph, self._stages)


def places_of(blocks: Sequence[str], graph: BlockGraph) -> tuple[int, ...]:
    """Return the place in the graph of each block of the layout."""
    places = {name: place for place, name in enumerate(graph.blocks)}
    beside = dict(graph.never_entered)
    # Parameters outside of all blocks go with the first block. A cut before code that uses them is not legal.
    return tuple(places[beside.get(name, name)] if name else 0 for name in blocks)


def packed(
    tensors: Sequence[Tensor | None], allocate: Allocate
) -> tuple[tuple[CrossingTensor | None, ...], tuple[Tensor, ...]]:
    """Return the descriptions of all tensors, and 1-D copies of those that are not None, in order."""
    shapes = tuple(None if tensor is None else shape_of(tensor) for tensor in tensors)
    return shapes, tuple(_copied(tensor.detach(), allocate) for tensor in tensors if tensor is not None)


def unpacked(shapes: Sequence[CrossingTensor | None], flats: Sequence[Tensor]) -> list[Tensor | None]:
    """Return views of received tensors, in the order of the crossing. Those that require a gradient are leaves."""
    coming = iter(flats)
    return [None if shape is None else _view(shape, next(coming)) for shape in shapes]


def _copied(tensor: Tensor, allocate: Allocate) -> Tensor:
    """Return a 1-D copy of the memory from the first to the last element, including gaps."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    flat = allocated(allocate, span, tensor.dtype)
    return flat.copy_(tensor.as_strided((span,), (1,)))


def _view(shape: CrossingTensor, flat: Tensor) -> Tensor:
    assert flat.dtype is getattr(torch, shape.dtype)
    return flat.detach().as_strided(shape.shape, shape.stride, 0).requires_grad_(shape.requires_grad)
