"""Tensors of other devices by way of pinned host memory: copied there, communicated there, copied back.

An operation begins when the device has done what its caller had submitted before the call, and it is done when its
results are on the device. CUDA is all that is known here; nothing of threads, sockets or groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.reducing import Operation, Participant


def is_far(tensor: torch.Tensor) -> bool:
    """Whether the tensor has to be copied to the host. Raises ValueError for devices that are not known."""
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"tensors of the CPU and of CUDA devices are communicated; got one on {tensor.device}")
    return tensor.device.type == "cuda"


class HostTensors:
    """Takes tensors as they are: all are on the host.

    Each tensor of an operation passes through the method that says what the operation does with it.
    """

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is only read."""
        return tensor

    def wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is only written, all of it."""
        return tensor

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is read and written."""
        return tensor


@dataclass(kw_only=True)
class PinnedTensors(HostTensors):
    """Host copies of device tensors, one of each."""

    back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # device's, host's
    _made: dict[int, torch.Tensor] = field(default_factory=dict)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_far(tensor):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = _pinned(tensor).copy_(tensor)
        return self._made[id(tensor)]

    def wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        if not is_far(tensor):
            return tensor
        host = self._made[id(tensor)] if id(tensor) in self._made else _pinned(tensor)
        self.back.append((tensor, host))
        return host

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        self.given(tensor)
        return self.wanted(tensor)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # Contiguous whatever the original is; torch keeps pinned memory for the next one.
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.cuda.is_available())


class CopiedBack:
    """An operation on host copies whose results go to the device at its end."""

    def __init__(self, operation: Operation, back: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._operation, self._back = operation, back
        self.description, self.lends = operation.description, operation.lends
        self.rounds: tuple[Round, ...] = operation.rounds or (Round(),)
        self._has_rounds = bool(operation.rounds)

    def offer(self, number: int) -> torch.Tensor:
        return self._operation.offer(number)

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        self._operation.take(number, rank, tensor)

    def finish(self, number: int) -> None:
        if self._has_rounds:
            self._operation.finish(number)
        if number == len(self.rounds) - 1:
            for device, host in self._back:
                device.copy_(host)  # waits until it is there


def staged_on_host(
    make: Callable[[Participant, HostTensors], Operation], tensors: Iterable[torch.Tensor]
) -> Callable[[Participant], Operation]:
    """The maker of an operation on host copies of `tensors`, which are all that it reads or writes.

    Raises ValueError for tensors of a device that is not known.
    """
    far = [tensor for tensor in tensors if is_far(tensor)]
    if not far:
        return lambda participant: make(participant, HostTensors())
    devices = {tensor.device for tensor in far if tensor.is_cuda}
    submitted = [torch.cuda.current_stream(device).record_event() for device in devices]

    def build(participant: Participant) -> Operation:
        for event in submitted:
            event.synchronize()
        copies = PinnedTensors()
        return CopiedBack(make(participant, copies), copies.back)

    return build
