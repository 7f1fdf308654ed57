"""One state as bytes of a file: frames of its tensors, then a tail that describes them and has their checksums.

A frame has at most FRAME_BYTES of one tensor; it is packed with zstd where a quick look says that this pays, else raw.
What the quick look is made of was measured: docs/checkpoints.md, "What packs".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import torch
import xxhash
import zstandard
from torch import Tensor

from elastrain.snapshot.durable.errors import DamagedError
from elastrain.snapshot.durable.manifest import Part
from elastrain.snapshot.durable.places.port import Sink, Source

FRAME_BYTES = 4 << 20
LEVEL = 1
PAYS_BELOW = 0.75
"""Packed bytes over plain bytes. Trained fp32 numbers pack to 0.9 at 1 GB/s: slower than a drive takes them raw."""
_SLICES, _SLICE_BYTES = 4, 8 << 10
_TAIL_BYTES_MAX = 256 << 20


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """In the order of the file."""

    tensor: int
    plain_bytes: int
    stored_bytes: int
    packed: bool
    checksum: int
    """xxh3 of the stored bytes."""


class _Tail(msgspec.Struct, frozen=True, array_like=True):
    """`meta` as it was given; dtype and number of elements of each tensor."""

    meta: bytes
    tensors: tuple[tuple[str, int], ...]
    frames: tuple[_Frame, ...]


def write(sink: Sink, file: str, meta: bytes, tensors: Sequence[Tensor]) -> Part:
    """Append one section. `tensors` are 1-D and contiguous. Raises what the sink raises."""
    offset = sink.size_bytes
    frames = [
        _write_frame(sink, index, piece)
        for index, tensor in enumerate(tensors)
        for piece in _pieces(bytes_of(tensor.detach().cpu()))
    ]
    kinds = tuple((str(tensor.dtype).removeprefix("torch."), tensor.numel()) for tensor in tensors)
    tail = msgspec.msgpack.encode(_Tail(meta, kinds, tuple(frames)))
    sink.write(memoryview(tail))
    return Part(
        file=file,
        offset_bytes=offset,
        size_bytes=sink.size_bytes - offset,
        tail_bytes=len(tail),
        tail_checksum=xxhash.xxh3_64_intdigest(tail),
        plain_bytes=sum(frame.plain_bytes for frame in frames),
    )


def read(source: Source, part: Part, what: str) -> tuple[bytes, list[Tensor]]:
    """Meta and tensors of a section, in memory of their own; every byte is checked. `what` names it in a sentence.

    Raises DamagedError, what the source raises, and MemoryError.
    """
    tail = _tail(source, part, what)
    tensors = [torch.empty(numel, dtype=_dtype(name, what, part)) for name, numel in tail.tensors]
    views = [bytes_of(tensor) for tensor in tensors]
    filled = [0] * len(views)
    offset = part.offset_bytes
    for number, frame in enumerate(tail.frames):
        start = filled[frame.tensor]
        view = views[frame.tensor][start : start + frame.plain_bytes]
        _read_frame(source, frame, offset, view, f"frame {number} of {what} in {part.file}")
        filled[frame.tensor] += frame.plain_bytes
        offset += frame.stored_bytes
    return tail.meta, tensors


def check(source: Source, part: Part, what: str) -> None:
    """Raises DamagedError unless file and tail are as the manifest says: a quick look that reads no frame."""
    _tail(source, part, what)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in host memory: a view."""
    if not tensor.numel():
        return memoryview(b"")
    raw: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, FRAME_BYTES):
        yield data[start : start + FRAME_BYTES]


def _write_frame(sink: Sink, tensor: int, plain: memoryview) -> _Frame:
    stored = _packed(plain)
    data = plain if stored is None else stored
    sink.write(data)
    return _Frame(tensor, plain.nbytes, data.nbytes, stored is not None, xxhash.xxh3_64_intdigest(data))


def _packed(plain: memoryview) -> memoryview | None:
    """The frame as zstd makes it; None where that spares too little."""
    if not _looks_packable(plain):
        return None
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=False).compress(plain)
    return memoryview(packed) if len(packed) < PAYS_BELOW * plain.nbytes else None


def _looks_packable(plain: memoryview) -> bool:
    """By some slices of it, so that a frame that does not pack costs next to nothing."""
    apart = max(1, plain.nbytes // _SLICES)
    sample = b"".join(plain[start : start + _SLICE_BYTES] for start in range(0, plain.nbytes, apart))
    return len(zstandard.ZstdCompressor(level=LEVEL).compress(sample)) < PAYS_BELOW * len(sample)


def _tail(source: Source, part: Part, what: str) -> _Tail:
    end = part.offset_bytes + part.size_bytes
    if source.size_bytes < end:
        raise DamagedError(
            f"{part.file} is cut short: {what} ends at byte {end:,}, and the file has {source.size_bytes:,}"
        )
    if part.tail_bytes > _TAIL_BYTES_MAX:
        raise DamagedError(f"{what} in {part.file} has a description of {part.tail_bytes:,} bytes: that cannot be")
    raw = bytearray(part.tail_bytes)
    source.read_into(memoryview(raw), end - part.tail_bytes)
    if xxhash.xxh3_64_intdigest(raw) != part.tail_checksum:
        raise DamagedError(f"the description of {what} in {part.file} is damaged: its checksum differs")
    try:
        tail = msgspec.msgpack.decode(raw, type=_Tail)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"the description of {what} in {part.file} is none: {error}") from None
    _check_sizes(tail, part, what)
    return tail


def _check_sizes(tail: _Tail, part: Part, what: str) -> None:
    """Frames fill the part and the tensors exactly."""
    plain = [0] * len(tail.tensors)
    for frame in tail.frames:
        if not 0 <= frame.tensor < len(plain) or min(frame.plain_bytes, frame.stored_bytes) < 0:
            raise DamagedError(f"the description of {what} in {part.file} is none: a frame belongs to no tensor")
        plain[frame.tensor] += frame.plain_bytes
    wanted = [_dtype(name, what, part).itemsize * numel for name, numel in tail.tensors]
    stored = sum(frame.stored_bytes for frame in tail.frames)
    if plain != wanted or stored + part.tail_bytes != part.size_bytes:
        raise DamagedError(f"the description of {what} in {part.file} is none: its frames do not fill its tensors")


def _read_frame(source: Source, frame: _Frame, offset: int, view: memoryview, what: str) -> None:
    raw = memoryview(bytearray(frame.stored_bytes)) if frame.packed else view
    source.read_into(raw, offset)
    if xxhash.xxh3_64_intdigest(raw) != frame.checksum:
        raise DamagedError(f"{what} is damaged: its checksum differs")
    if not frame.packed:
        return
    try:
        plain = zstandard.ZstdDecompressor().decompress(raw, max_output_size=frame.plain_bytes)
    except zstandard.ZstdError as error:
        raise DamagedError(f"{what} is damaged: it cannot be unpacked ({error})") from None
    if len(plain) != frame.plain_bytes:
        raise DamagedError(f"{what} is damaged: {len(plain):,} of {frame.plain_bytes:,} bytes were unpacked")
    view[:] = plain


def _dtype(name: str, what: str, part: Part) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise DamagedError(f"the description of {what} in {part.file} is none: {name[:40]!r} is no dtype")
    return dtype
