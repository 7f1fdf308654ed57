"""Tensors to sections of a file and back: `frames` with torch's types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from elastrain.snapshot.durable import frames
from elastrain.snapshot.durable.errors import DamagedError
from elastrain.snapshot.durable.frames import FrameEntry
from elastrain.snapshot.durable.manifest import Part, ShardEntry
from elastrain.snapshot.durable.places.port import Sink, Source
from elastrain.snapshot.state import ShardState

Content = tuple[bytes, list[Tensor]]


def write(sink: Sink, file: str, meta: bytes, tensors: Sequence[Tensor]) -> Part:
    """Append one section. `tensors`: 1-D and contiguous, on any device. Raises what the sink raises, ValueError."""
    here = [tensor.detach().cpu() for tensor in tensors]
    named = [(str(tensor.dtype).removeprefix("torch."), bytes_of(tensor)) for tensor in here]
    return frames.write(sink, file, meta, named)


def read(source: Source, part: Part, what: str) -> Content:
    """Meta and tensors of a section, in memory of their own; every byte is checked. `what` names it in a sentence.

    Raises DamagedError, what the source raises, and MemoryError.
    """
    tail = frames.read_tail(source, part, what)
    tensors = [torch.empty(numel, dtype=getattr(torch, dtype)) for dtype, numel in tail.arrays]
    rest = [bytes_of(tensor) for tensor in tensors]

    def into(frame: FrameEntry) -> memoryview:
        view, rest[frame.array] = rest[frame.array][: frame.plain_bytes], rest[frame.array][frame.plain_bytes :]
        return view

    frames.read_frames(source, part, tail, what, into)
    return tail.meta, tensors


def check_state(entry: ShardEntry, part: Part, content: Content) -> ShardState:
    """The state that a section holds. Raises DamagedError unless its digest is the manifest's."""
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


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory: a view."""
    if not tensor.numel():
        return memoryview(b"")
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)
