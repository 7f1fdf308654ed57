"""The tracing pass of a member: the body of the user's loop, once over a batch with every block on fakes.

It counts for nothing: the batch is loaded again for its own micro-batch, and the random streams begin anew there.

Boundary tensors as they travel: 1-D pieces of their maker's shared memory, and what they are, beside them.

Strides are kept, because kernels choose by them; a copy once made is never written again.
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
    """Iterate over it for its one batch, and call `backward` once; then `traced` is there."""

    micro_batch = 0

    def __init__(self, step: int, parts: StepParts, model: nn.Module, stages: int) -> None:
        self.backward_is_due = False
        self.traced: TracedModel | None = None
        self._step, self._parts, self._stages = step, parts, stages
        self._pass = TracingPass(model, [block for block in parts.model.layout.blocks if block])

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts
        # The same for all, newcomers too: graphs are compared, and what is in it may say which blocks are entered.
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
        """The forward is over. Raises ConfigError for a model that cannot be cut into so many stages."""
        self.backward_is_due = False
        self.traced = self._pass.finish()
        check_stages(self.traced.graph, self._stages)


def places_of(blocks: Sequence[str], graph: BlockGraph) -> tuple[int, ...]:
    """Per block of the layout, its place in the graph."""
    places = {name: place for place, name in enumerate(graph.blocks)}
    beside = dict(graph.never_entered)
    # Parameters outside of all blocks go with the first one: code that uses them behind a cut forbids that cut.
    return tuple(places[beside.get(name, name)] if name else 0 for name in blocks)


def packed(
    tensors: Sequence[Tensor | None], allocate: Allocate
) -> tuple[tuple[CrossingTensor | None, ...], tuple[Tensor, ...]]:
    """What each is, and copies of those that are there, in order."""
    shapes = tuple(None if tensor is None else shape_of(tensor) for tensor in tensors)
    return shapes, tuple(_copied(tensor.detach(), allocate) for tensor in tensors if tensor is not None)


def unpacked(shapes: Sequence[CrossingTensor | None], flats: Sequence[Tensor]) -> list[Tensor | None]:
    """Views of what came, in the order of the crossing; those that require a gradient are leaves."""
    coming = iter(flats)
    return [None if shape is None else _view(shape, next(coming)) for shape in shapes]


def _copied(tensor: Tensor, allocate: Allocate) -> Tensor:
    """All elements from the first to the last one in memory, with what lies between them."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    flat = allocated(allocate, span, tensor.dtype)
    return flat.copy_(tensor.as_strided((span,), (1,)))


def _view(shape: CrossingTensor, flat: Tensor) -> Tensor:
    assert flat.dtype is getattr(torch, shape.dtype)
    return flat.detach().as_strided(shape.shape, shape.stride, 0).requires_grad_(shape.requires_grad)
