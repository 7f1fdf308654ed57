"""Warm-up of blocks that are coming to a member: one forward of each on zeros, which leaves no trace.

It allocates and compiles what the block's first micro-batch would otherwise wait for. Generators, buffers, attributes,
hooks, modes and the graph of autograd are afterwards as they were.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_unflatten

from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.stubs.fakes import BlockOutputs, Unsaved, left_as_it_was
from elastrain.pipeline.stubs.passes import AutocastState, ReceivedCopy
from elastrain.pipeline.stubs.placeholders import AbsentParameter, behind_entry


@dataclass(frozen=True)
class BlockEntry:
    """The arguments with which a forward has entered a block, without values, and the modes at that moment."""

    arguments: BlockOutputs
    """The pair `(args, kwargs)`, with descriptions in place of tensors."""
    has_grad: bool
    autocast: AutocastState

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> BlockEntry | None:
        """Return the entry, or None for tensors that have no strides. `device`: the device that computes."""
        try:
            arguments = BlockOutputs.of((args, kwargs))
        except RuntimeError:
            return None
        return BlockEntry(arguments, torch.is_grad_enabled(), AutocastState(device.type))

    def zeros(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return such arguments with zeros in all tensors."""
        its = zip(self.arguments.leaves, self.arguments.devices, strict=True)
        made = [_zeros(leaf, device) if isinstance(leaf, CrossingTensor) else leaf for leaf, device in its]
        args, kwargs = tree_unflatten(made, self.arguments.tree)
        return args, kwargs

    @contextlib.contextmanager
    def modes(self) -> Iterator[None]:
        """Return a context that sets the modes of that moment. They decide what a compiler makes of a block."""
        try:
            with self.autocast.again(), torch.set_grad_enabled(self.has_grad):
                yield
        finally:
            # The cache may hold weights of a shadow, whose values change.
            torch.clear_autocast_cache()


def warm_up(block: nn.Module, entry: BlockEntry) -> str:
    """Compute an absent block on zeros. Returns the reason if it fails: its parameters may have no values yet."""
    AbsentParameter.computing.add(entry)
    try:
        with left_as_it_was(block, wholly=True, is_eager=False), Unsaved(), entry.modes():
            args, kwargs = entry.zeros()
            behind_entry(block)(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  the block's own code, on values that no micro-batch has
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        AbsentParameter.computing.discard(entry)
    return ""


def _zeros(shape: CrossingTensor, device: torch.device | None) -> Tensor:
    sizes = zip(shape.shape, shape.stride, strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if 0 not in shape.shape else 0
    made = torch.empty_strided(shape.shape, shape.stride, dtype=getattr(torch, shape.dtype), device=device)
    made.as_strided((span,), (1,)).zero_()
    if not shape.requires_grad:
        return made
    # No leaf, as what comes from the block before, so that a block may change it in place.
    copy: Tensor = ReceivedCopy.apply(made.requires_grad_(), {}, 0)  # type: ignore[no-untyped-call]  # of torch
    return copy
