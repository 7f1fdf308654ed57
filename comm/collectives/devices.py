"""Collectives on device tensors, through copies in pinned host memory.

All copies are submitted to side streams, behind the work that the caller had submitted before the call. So the device
goes on computing meanwhile. An operation ends once its results are on their way to the device: the stream of whoever
waits for it waits for these copies, and no host thread does. No threads, sockets or groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from elastrain.comm.collectives.algorithms import Round
from elastrain.comm.collectives.reducing import Operation, Participant
from elastrain.device import DeviceEvent, device_of


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
    """Copies of device tensors in pinned host memory, one for each tensor.

    `submitted` is the event behind the caller's work on each device.
    """

    submitted: Mapping[torch.device, DeviceEvent]
    back: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # pairs: device tensor, its host copy
    _made: dict[int, torch.Tensor] = field(default_factory=dict)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host copy with the device tensor's contents."""
        if not is_far(tensor):
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = host = _pinned(tensor)
            device_of(tensor.device).copy_out(tensor, host, self.submitted[tensor.device]).synchronize()
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
    """An operation on host copies. After its last round, its results are on their way to the device, by `land`."""

    def __init__(self, operation: Operation, land: Callable[[], None]) -> None:
        self._operation, self._land = operation, land
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
        """Finish a round; after the last one, begin to copy the results to the device."""
        if self._has_rounds:
            self._operation.finish(number)
        if number == len(self.rounds) - 1:
            self._land()


def copy_back(host: torch.Tensor, tensor: torch.Tensor, after: DeviceEvent) -> DeviceEvent:
    """Begin to copy a pinned tensor to the device, once `after` is reached, and return the event behind the copy."""
    event = device_of(tensor.device).copy_in(host, tensor, after)
    event.then(lambda _error, _kept=host: None)  # type: ignore[misc] # the host tensor lives until then
    return event


def staged_on_host(
    make: Callable[[Participant, HostTensors], Operation], tensors: Iterable[torch.Tensor]
) -> tuple[Callable[[Participant], Operation], list[DeviceEvent]]:
    """Return a function that makes an operation on host copies of `tensors`, and the list of its copies to devices.

    The list is filled when the operation ends. `make` may read and write no other tensors. Raises ValueError for
    tensors of an unsupported device.
    """
    far = {tensor.device for tensor in tensors if is_far(tensor)}
    if not far:
        return (lambda participant: make(participant, HostTensors())), []
    submitted = {device: device_of(device).record(blocking=False) for device in far}
    landed: list[DeviceEvent] = []

    def build(participant: Participant) -> Operation:
        copies = PinnedTensors(submitted=submitted)

        def land() -> None:
            landed.extend(copy_back(host, tensor, submitted[tensor.device]) for tensor, host in copies.back)

        return CopiedBack(make(participant, copies), land)

    return build, landed
