"""Torch tensors as sections of a file: `state_file` with torch's types."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.snapshot.durable import state_file
from elastrain.snapshot.durable.errors import DamagedError
from elastrain.snapshot.durable.manifest import Part, ShardEntry
from elastrain.snapshot.durable.places.port import Sink, Source
from elastrain.snapshot.durable.state_file import FrameEntry, Tail
from elastrain.snapshot.shard_state import ShardState

Content = tuple[bytes, list[Tensor]]


def write(sink: Sink, file: str, meta: bytes, tensors: Sequence[Tensor]) -> Part:
    """Append one section. `tensors` are 1-D and contiguous, on any device.

    Raises what the sink raises, and ValueError for an unknown dtype.
    """
    here = [tensor.detach().cpu() for tensor in tensors]
    named = [(str(tensor.dtype).removeprefix("torch."), bytes_of(tensor)) for tensor in here]
    return state_file.write(sink, file, meta, named)


def read(source: Source, part: Part, what: str) -> Content:
    """Return meta and tensors of a section, in new memory. Every byte is checked.

    `what` names the section in error messages. Raises DamagedError, what the source raises, and MemoryError.
    """
    tail = state_file.read_tail(source, part, what)
    return tail.meta, _arrays(source, part, tail, what, len(tail.arrays))


def read_first(source: Source, part: Part, what: str) -> Content:
    """Return meta and only the first tensor of a section; other frames are not read. Raises as `read`."""
    tail = state_file.read_tail(source, part, what)
    return tail.meta, _arrays(source, part, tail, what, 1)


def _arrays(source: Source, part: Part, tail: Tail, what: str, count: int) -> list[Tensor]:
    made = [_fresh(numel, getattr(torch, dtype)) for dtype, numel in tail.arrays[:count]]
    rest = [memory for _, memory in made]

    def into(frame: FrameEntry) -> memoryview | None:
        if frame.array >= count:
            return None
        memory = rest[frame.array]
        rest[frame.array] = memory[frame.plain_bytes :]
        return memory[: frame.memory_bytes]

    state_file.read_frames(source, part, tail, what, into)
    return [tensor for tensor, _ in made]


def _fresh(numel: int, dtype: torch.dtype) -> tuple[Tensor, memoryview]:
    """Return a new tensor, and its memory to read into.

    A large tensor gets whole pages, so that a drive can fill them directly.
    """
    size_bytes = numel * dtype.itemsize
    if not state_file.is_paged(size_bytes):
        tensor = torch.empty(numel, dtype=dtype)
        return tensor, bytes_of(tensor)
    whole_bytes = -(-size_bytes // state_file.PAGE_BYTES) * state_file.PAGE_BYTES
    pages = mmap.mmap(-1, whole_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # No huge pages: in a virtual machine with untouched memory they took ten times as long as small pages.
    return torch.frombuffer(pages, dtype=dtype, count=numel), memoryview(pages)


def check_state(entry: ShardEntry, part: Part, content: Content) -> ShardState:
    """Return the state that a section holds. Raises DamagedError unless its digest is that of the manifest."""
    try:
        state = ShardState.unpack(*content)
    except ValueError as error:
        raise DamagedError(f"shard {entry.index} in {part.file} is none: {error}") from None
    if state.digest() != entry.digest:
        raise DamagedError(
            f"shard {entry.index} in {part.file} has another digest than the manifest says: it is the state of another "
            "shard or step, or it was damaged before it was written"
        )
    return state


def check_parameters(entry: ShardEntry, part: Part, content: Content) -> Tensor:
    """Return a shard's parameters. Does not check the digest.

    Raises DamagedError unless the section belongs to that shard.
    """
    meta, tensors = content
    described = ShardState.described(meta)
    if described != entry.index or len(tensors) != 1 or tensors[0].numel() != entry.numel:
        raise DamagedError(f"shard {entry.index} in {part.file} is none: it is described as {described}")
    return tensors[0]


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, as a view."""
    if not tensor.numel():
        return memoryview(b"")
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)
