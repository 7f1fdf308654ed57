"""Collectives on device tensors, through copies in pinned host memory.

An operation begins when the device has finished the work that its caller had submitted before the call. It is done when
its results are on the device. No threads, sockets or groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.reducing import Operation, Participant
from elastrain.device import device_of


def is_far(tensor: torch.Tensor) -> bool:
    """Return True if the tensor must be copied to the host. Raises ValueError for unsupported devices."""
    return not device_of(tensor.device).is_host


class HostTensors:
    """Pass-through for operations whose tensors are all on the host.

    An operation gets each of its tensors from the method that names how it uses the tensor.
    """

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the operation reads in place of this tensor: the tensor itself, since it is in host memory."""
        return tensor

    def wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the operation only writes, all of it."""
        return tensor

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that the operation reads and writes."""
        return tensor


@dataclass(kw_only=True)
class PinnedTensors(HostTensors):
    """Copies of device tensors in pinned host memory, one for each tensor."""

    back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # pairs: device tensor, its host copy
    _made: dict[int, torch.Tensor] = field(default_factory=dict)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host copy with the device tensor's contents."""
        if not is_far(tensor):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = _pinned(tensor).copy_(tensor)
        return self._made[id(tensor)]

    def wanted(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor whose contents are copied to the device tensor at the end."""
        if not is_far(tensor):
            return tensor
        host = self._made[id(tensor)] if id(tensor) in self._made else _pinned(tensor)
        self.back.append((tensor, host))
        return host

    def changed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host copy with the device tensor's contents, copied back at the end."""
        self.given(tensor)
        return self.wanted(tensor)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    # Contiguous even if the original is not. torch caches pinned memory for the next copy.
    return device_of(tensor.device).empty_pinned(tensor.shape, tensor.dtype)


class CopiedBack:
    """An operation on host copies. Its results are copied to the device after its last round."""

    def __init__(self, operation: Operation, back: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._operation, self._back = operation, back
        self.description, self.lends = operation.description, operation.lends
        self.rounds: tuple[Round, ...] = operation.rounds or (Round(),)
        self._has_rounds = bool(operation.rounds)

    def offer(self, number: int) -> torch.Tensor:
        """Return what the wrapped operation offers in this round."""
        return self._operation.offer(number)

    def take(self, number: int, rank: int, tensor: torch.Tensor) -> None:
        """Pass a message to the wrapped operation."""
        self._operation.take(number, rank, tensor)

    def finish(self, number: int) -> None:
        """Finish a round; after the last one, copy the results to the device."""
        if self._has_rounds:
            self._operation.finish(number)
        if number == len(self.rounds) - 1:
            for device, host in self._back:
                device.copy_(host)  # blocks until the copy is complete


def staged_on_host(
    make: Callable[[Participant, HostTensors], Operation], tensors: Iterable[torch.Tensor]
) -> Callable[[Participant], Operation]:
    """Return a function that makes an operation on host copies of `tensors`.

    `make` may read and write no other tensors. Raises ValueError for tensors of an unsupported device.
    """
    far = [tensor for tensor in tensors if is_far(tensor)]
    if not far:
        return lambda participant: make(participant, HostTensors())
    submitted = [device_of(device).record(blocking=False) for device in {tensor.device for tensor in far}]

    def build(participant: Participant) -> Operation:
        for event in submitted:
            event.synchronize()
        copies = PinnedTensors()
        return CopiedBack(make(participant, copies), copies.back)

    return build
