"""Boundary tensors of a pipeline's member, and the results of its actions.

`packed` and `unpacked` convert boundary tensors to 1-D pieces of shared memory and back. The memory is the host's, or
the device's if all members read it in place. Strides are kept, because kernels depend on them. A copy is never written
again. Tensors on a device are copied on side streams. The calling thread does not wait for these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from elastrain import protocol as p
from elastrain.device import DeviceEvent, device_of
from elastrain.job.values import Contribution
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import Direction
from elastrain.pipeline.stubs.fakes import shape_of
from elastrain.protocol.messages import Boundary
from elastrain.runtime.io.loop_channel import BoundaryMade
from elastrain.runtime.model.flats import Allocate, allocated

Counts = Callable[[], Contribution]
"""A function that returns a contribution. On a device, the engine's thread calls it."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """Boundary tensors as they are sent."""

    shapes: tuple[CrossingTensor | None, ...] = ()
    tensors: tuple[Tensor, ...] = ()
    """1-D copies in shared memory of those that are not None, in order."""
    copied: tuple[DeviceEvent, ...] = ()
    """For each copy, the event behind it."""


def packed(tensors: Sequence[Tensor | None], allocate: Allocate) -> Packed:
    """Describe the tensors and copy them to memory that `allocate` returns."""
    shapes = tuple(None if tensor is None else shape_of(tensor) for tensor in tensors)
    copies = [_copied_out(tensor.detach(), allocate) for tensor in tensors if tensor is not None]
    return Packed(shapes=shapes, tensors=tuple(flat for flat, _ in copies), copied=tuple(event for _, event in copies))


def unpacked(
    shapes: Sequence[CrossingTensor | None],
    flats: Sequence[Tensor],
    devices: Sequence[torch.device],
    made: DeviceEvent,
) -> list[Tensor | None]:
    """Return received tensors, in the order of the crossing. Those that require a gradient are leaves.

    On the host they are views of `flats`, on a device copies, for which the current stream waits.

    Args:
        shapes: Description of each tensor that crosses, or None.
        flats: What was received, without those that are None.
        devices: The device of each tensor that crosses.
        made: Event behind the flats that this member has made itself, and that lie on the device.
    """
    coming, each = iter(flats), zip(shapes, devices, strict=True)
    return [None if shape is None else _view(shape, _copied_in(next(coming), device, made)) for shape, device in each]


def _copied_out(tensor: Tensor, allocate: Allocate) -> tuple[Tensor, DeviceEvent]:
    """Return a 1-D copy of the memory from the first to the last element, including gaps."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    port, source = device_of(tensor.device), tensor.as_strided((span,), (1,))
    flat = allocated(allocate, span, tensor.dtype)
    if port.is_host and flat.device.type != "cpu":  # it belongs on the host for its reader, too, and is sent as bytes
        flat = torch.empty(span, dtype=tensor.dtype, device="cpu")
    # On a device the copy comes later, and the script may change its tensor in place before.
    return flat, port.copy_out(source if port.is_host else source.clone(), flat)


def _copied_in(flat: Tensor, device: torch.device, made: DeviceEvent) -> Tensor:
    port = device_of(device)
    if port.is_host:
        return flat
    with port.side_stream("in"):  # the memory is of this stream, so the copy waits for no computation
        if flat.device.type != "cpu":
            made.wait()
        copy = port.empty(flat.shape, flat.dtype)
        copied = port.copy_in(flat, copy, port.record())
    copied.wait()
    port.record_stream(copy)
    copied.then(partial(_let_go, flat))
    return copy


def _let_go(flat: Tensor, error: Exception | None) -> None:
    """Hold received memory until a copy of it has landed: its owner uses it again afterwards."""


def _view(shape: CrossingTensor, flat: Tensor) -> Tensor:
    assert flat.dtype is getattr(torch, shape.dtype)
    return flat.detach().as_strided(shape.shape, shape.stride, 0).requires_grad_(shape.requires_grad)


@dataclass(frozen=True, kw_only=True)
class ActionResult:
    """The result of a finished action."""

    action: TaskAction
    made: Packed | None = None
    """The tensors that cross the action's cut; None if no member takes them."""
    counts: Counts = Contribution
    """The contribution that is sent with a gradient."""
    took: Callable[[], tuple[float, ...]] = tuple
    """Seconds that the action took; see `Computed.took_s`."""
    is_split: bool = False
    """True for a backward that has left its weight gradients to a later action."""
    host_s: tuple[float, float] = (0.0, 0.0)
    """See `Computed.host_s`."""

    def report(self, shape: StepShape) -> BoundaryMade:
        """Return the report of the action. On a device, the engine's thread calls it."""
        action, task, is_forward = self.action, self.action.task, self.action.kind is ActionKind.FORWARD
        message: Boundary | None = None
        if self.made is not None:
            cut = task.end if is_forward else task.begin
            name = shape.name(action.micro_batch, cut, Direction.ACTIVATION if is_forward else Direction.GRADIENT)
            counts = None if is_forward else self.counts()
            message = Boundary(name=name, tensors=self.made.shapes, contribution=counts)
        has_weights = not is_forward and not self.is_split
        is_last = has_weights and action.micro_batch == shape.micro_batches_of(task.run)[-1]
        computed = p.Computed(
            step=shape.number,
            action=action,
            made=message,
            is_last=is_last,
            is_split=self.is_split,
            took_s=self.took(),
            host_s=self.host_s,
        )
        return BoundaryMade(event=computed, tensors=() if self.made is None else self.made.tensors)
