"""Boundary tensors as they travel: 1-D pieces of their maker's shared memory, and what they are, beside them.

Strides are kept, because kernels choose by them; a copy once made is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.stubs.fakes import shape_of
from elastrain.runtime.flats import Allocate, allocated


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
