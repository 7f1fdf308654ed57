"""Flips of one bit: in a worker's memory, in what it sends, and in the checkpoint files that it has written.

Host memory is changed by address, and a device's through `.data`, so no version counter of torch notices.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from elastrain.device import DevicePort, device_of
from elastrain.job.placement import Placement
from elastrain.runtime.tensors.executor import Executor
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import visible
from elastrain.snapshot.shard_state import ShardState

_SETTLES_S = 2.0
"""A backup usually verifies its update within this time. Less than `hang_timeout_s`: longer would be a hang."""


def flip(tensor: Tensor, bit: int) -> str:
    """Flip this bit of the number with the largest absolute value, which no sum swallows. Returns why not, or ""."""
    port = device_of(tensor.device)
    if tensor.numel() == 0:
        return f"there is no memory to change in {tensor.numel()} numbers on {tensor.device}"
    if not port.is_host:
        torch.accelerator.synchronize(port.device)  # no stream is using the memory meanwhile
    flat = tensor.detach().reshape(-1)  # a view: states, flats and slots lie in one piece
    struck = flat[int(flat.abs().argmax()) :]
    byte, shift = divmod(bit % (8 * tensor.element_size()), 8)
    if port.is_host:
        ctypes.c_ubyte.from_address(struck.data_ptr() + byte).value ^= 1 << shift
    else:
        struck.data.view(torch.uint8)[byte : byte + 1].bitwise_xor_(1 << shift)
        port.synchronize()
    return ""


class PartialFlip:
    """A bit flip in the next partial that leaves this member. Only the engine's thread uses it."""

    def __init__(self) -> None:
        self._bit: int | None = None

    def ask(self, bit: int) -> None:
        """Request the flip of this bit."""
        self._bit = bit

    def strike(self, payload: Sequence[Tensor]) -> None:
        """Flip the requested bit in a partial. `payload`: the checksums of the partial's parts, then the parts."""
        if self._bit is not None and len(payload) > 1:
            flip(payload[1], self._bit)
            self._bit = None


class FrameFlip:
    """A bit flip in the next bytes that leave this member on a socket: sealed bytes, or a frame within this host.

    Any thread may request it; the engine's thread sends.
    """

    def __init__(self) -> None:
        self._bit: int | None = None

    def ask(self, bit: int) -> None:
        """Request the flip of this bit."""
        self._bit = bit

    def tamper(self, leaving: memoryview) -> memoryview:
        """Return the bytes to send instead of `leaving` (see `Mesh`). The sender's own memory stays as it is."""
        if self._bit is None:
            return leaving
        changed = bytearray(leaving)
        changed[len(changed) // 2] ^= 1 << self._bit % 8
        self._bit = None
        return memoryview(changed)


@dataclass(frozen=True, kw_only=True)
class MemberMemory:
    """The memory of a member's trained shards. `holders` returns the present placement."""

    me: str
    executor: Executor
    holders: Callable[[], Placement]

    @property
    def port(self) -> DevicePort:
        """The device that computes."""
        return self.executor.memory.port

    def flip(self, where: str, bit: int) -> str:
        """Flip one bit of this kind of memory. Returns why not, or ""."""
        found = next(iter(self._tensors(where)), None)
        return f"{self.me} holds no {where} in memory just now" if found is None else flip(found, bit)

    def _tensors(self, where: str) -> Iterable[Tensor]:
        executor = self.executor
        match where:
            case "parameters":
                return (executor.model.parameters_of(executor.layout.shards[shard]) for shard in self._mine())
            case "taken":
                others = [shard for shard in self._trained() if shard not in self._mine()]
                theirs = [executor.layout.shards[shard] for shard in others]
                return (executor.model.parameters_of(shard) for shard in theirs if executor.model.has(shard))
            case "masters":
                shards = [executor.layout.shards[shard] for shard in self._mine()]
                halves = [shard.index for shard in shards if shard.master_dtype != shard.dtype]
                return (state.parameters for state in self._states(halves))
            case "moments":
                return (moment for state in self._states(self._mine()) for moment in _moments(state))
            case "backup":
                backed = [shard for shard in self._trained() if self.me in self.holders()[shard].backups]
                return (state.parameters for state in self._states(self._settled_first(backed)))
            case "micro-batch":
                landed = executor.model.landed
                return () if landed is None else (landed,)
            case _:
                return executor.books.kept_gradients()

    def _settled_first(self, shards: list[int]) -> list[int]:
        """Sort shards so that those with a settled state come first.

        A flip in a state already replaced would have no effect.

        The training loop's thread waits for a settled state. No step replaces it until the loop has computed its part.
        """
        is_settled = self.executor.books.is_settled
        until_s = time.monotonic() + (_SETTLES_S if threading.current_thread() is threading.main_thread() else 0.0)
        while shards and not any(map(is_settled, shards)) and time.monotonic() < until_s:
            time.sleep(0.001)
        return sorted(shards, key=lambda shard: not is_settled(shard))

    def _trained(self) -> list[int]:
        return [shard.index for shard in self.executor.layout.shards if shard.lanes]

    def _mine(self) -> list[int]:
        holders = self.holders()
        return [shard for shard in self._trained() if shard < len(holders) and holders[shard].primary == self.me]

    def _states(self, shards: Iterable[int]) -> Iterable[ShardState]:
        """Yield the states in memory.

        States on a drive are left out, because only a copy of them could be changed here.
        """
        states = self.executor.states
        return (states[shard] for shard in shards if shard in states and shard not in states.outside)


def _moments(state: ShardState) -> Iterable[Tensor]:
    """Yield the tensors that the optimizer keeps beside the parameters, without its step counters."""
    values = [value for piece in state.pieces for value in piece.values()]
    return (value for value in values if isinstance(value, Tensor) and value.numel() > 1)


@dataclass(frozen=True, kw_only=True)
class WrittenFiles:
    """The files that this member has written of durable checkpoints in a place."""

    me: str
    place: str

    def flip(self, bit: int) -> str:
        """Flip one bit in the middle of a file of the newest complete checkpoint. Returns why not, or ""."""
        try:
            path = self._newest()
            if path is None:
                return f"{self.me} has written no file of a complete checkpoint in a folder yet"
            at = path.stat().st_size // 2
            with path.open("r+b") as file:
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1 << bit % 8]))
        except (CheckpointError, OSError) as error:
            return f"the files of {self.place} cannot be changed: {error}"
        return ""

    def _newest(self) -> Path | None:
        place = place_at(self.place)
        if not isinstance(place, LocalPlace):
            return None
        for name in reversed(visible(place)):
            for file in place.names(name):
                if file.startswith(f"part-{self.me}-"):
                    return Path(place.location, name, file)
        return None
