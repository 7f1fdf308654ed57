"""Device memory that other processes read in place: a sealed memfd stands for the memory and its descriptor.

    from tests.support.late import sharing
    sharing.set_up()            # in the training script: jobs read each other's memory in place from then on

No clock crosses processes, so both ends are checked by themselves. Memory that peers are told of must have landed. When
the last tensor over a peer's memory goes, all work that reads it must have landed, because the peer uses the memory
again. Otherwise it is a race.
"""

from __future__ import annotations

import functools
import json
import os
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from elastrain.comm.errors import CommError
from elastrain.comm.shm.shared_memory import Mapping, create_sealed, open_sealed
from elastrain.comm.wire.link import Lending
from elastrain.device import device_sharing as sharing
from elastrain.device.device_sharing import SharingError
from tests.support.late import order
from tests.support.late.memory import GRAIN, LOCK, MEMORY, NAME, Block, block_of, is_late, span_of
from tests.support.late.settings import VARIABLE, settings

PROVIDER = "tests.support.late.sharing:LateSharing"
ONE_DEVICE = "all late devices of this host"


def set_up() -> None:
    """Let this process share its device's memory, as those of the product's probe do that it starts."""
    os.environ[VARIABLE] = json.dumps({**json.loads(os.environ.get(VARIABLE, "{}")), "shared": ONE_DEVICE})
    settings.change({"shared": ONE_DEVICE})
    if sharing.PROVIDERS.get(NAME) != PROVIDER:
        sharing.PROVIDERS[NAME] = PROVIDER
        watch(Lending, "lend")


class LateMapping:
    """A memfd at addresses of the device. A peer's is mapped read-only: a kernel that writes it ends by SIGSEGV."""

    def __init__(self, mapping: Mapping, *, is_own: bool) -> None:
        self.size_bytes = mapping.size_bytes
        self._mapping, self._is_own = mapping, is_own
        with LOCK:
            self.address = MEMORY.take_addresses(-(-self.size_bytes // GRAIN) * GRAIN)
            if is_own:
                _count(self.size_bytes)
                weakref.finalize(self, _count, -self.size_bytes).atexit = False

    def bytes_at(self, offset_bytes: int, size_bytes: int) -> Tensor:
        if self._is_own:
            return self._flat(offset_bytes, size_bytes)[0]
        # A peer may have sent several parts of one tensor, which begin at the same place.
        whole, block = self._flat(0, self.size_bytes)
        end_bytes = offset_bytes + size_bytes
        weakref.finalize(whole.untyped_storage(), _check_reads, block, offset_bytes, end_bytes).atexit = False
        return whole[offset_bytes:end_bytes]

    def _flat(self, offset_bytes: int, size_bytes: int) -> tuple[Tensor, Block]:
        """Return a tensor with a storage of its own over bytes of the mapping, and the block that all of these have."""
        base = self.address + offset_bytes
        with LOCK:
            order.reap()
            block = MEMORY.blocks.get(base)
            if block is None:
                host = _host_bytes(self._mapping, offset_bytes, size_bytes).untyped_storage()
                block = MEMORY.blocks[base] = Block(
                    base, size_bytes, host, order.current_stream().number, is_shared=True
                )
            else:
                block.owners += 1
            return MEMORY.flat(block, torch.uint8), block


_own_bytes = 0
"""Bytes that this process shares."""


def _count(size_bytes: int) -> None:
    global _own_bytes
    _own_bytes += size_bytes
    MEMORY.count(size_bytes)


def _host_bytes(mapping: Mapping, offset_bytes: int, size_bytes: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        view = mapping.view(offset_bytes, size_bytes)
        weakref.finalize(view, _keep, mapping).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)


def _keep(_: Mapping) -> None:
    """Keep a mapping for as long as its bytes are in use."""


class LateSharing:
    """See `DeviceSharing` in the product. All devices of the host's processes read each other's memory."""

    page_bytes = 4096

    def __init__(self, index: int) -> None:
        from tests.support import late

        late.install()
        self.index = index
        self.identities = (settings.shared,)
        limit_bytes = settings.shareable_bytes
        self.segment_bytes = 1 << 20 if limit_bytes is None else max(self.page_bytes, limit_bytes // 4)
        if not settings.shared:
            raise SharingError("memory of this late device is not shared between processes")

    def create(self, size_bytes: int, index: int | None = None) -> tuple[int, LateMapping]:
        try:
            with LOCK:
                order.reap()
                MEMORY.check_room(size_bytes)
                if settings.shareable_bytes is not None and _own_bytes + size_bytes > settings.shareable_bytes:
                    raise SharingError(f"late shares at most {settings.shareable_bytes} bytes (`shareable_bytes`)")
            fd, mapping = create_sealed("elastrain-device", size_bytes)
        except (torch.OutOfMemoryError, CommError) as error:
            raise SharingError(str(error)) from error
        return fd, LateMapping(mapping, is_own=True)

    def open(self, fd: int, size_bytes: int) -> LateMapping:
        if settings.unreadable:
            raise SharingError("late reads no memory of peers (`unreadable`)")
        try:
            return LateMapping(open_sealed(fd, size_bytes), is_own=False)
        except CommError as error:
            raise SharingError(str(error)) from error


def watch(owner: type, name: str) -> None:
    """Check, in each call of a method of a class, that its late tensors have landed: peers are told about them."""
    told = getattr(owner, name)

    @functools.wraps(told)
    def telling(self: Any, *args: Any, **kwargs: Any) -> Any:
        for each in args:
            if is_late(each):
                _check_told(each)
        return told(self, *args, **kwargs)

    setattr(owner, name, telling)


def _check_told(tensor: Tensor) -> None:
    with LOCK:
        block, (start, stop) = block_of(tensor), span_of(tensor)
        for (first, last, number, wrote), (tick, what) in list(block.accesses.items()):
            if wrote and first < stop and start < last and order.STREAMS[number].landed < tick:
                writer = f"{what} on stream {number}"
                order.race(f"peers are told of memory that {writer} writes, and the host has not waited for it")


def _check_reads(block: Block, start: int, stop: int) -> None:
    """Note a race if work that reads a peer's memory has not landed. A finalizer calls it, which cannot raise."""
    with LOCK:
        for (first, last, number, _), (tick, what) in list(block.accesses.items()):
            if first < stop and start < last and order.STREAMS[number].landed < tick:
                order.RACES.append(
                    f"a peer's memory was given back while {what} on stream {number} reads it, and the host has not "
                    "waited for it"
                )
