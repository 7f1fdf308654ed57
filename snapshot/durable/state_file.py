"""The file format of one state: frames of its arrays, then a tail that describes them. No torch.

A frame has at most FRAME_BYTES of one array. It is compressed with zstd if a sample shows that this pays, else stored
raw. docs/checkpoints.md, "What packs", has the measurements behind this choice. Large arrays come first and fill whole
pages, so that the drive can read them directly into their memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence

import msgspec
import xxhash
import zstandard

from elastrain.base.line_files import unpacked
from elastrain.snapshot.durable.errors import DamagedError
from elastrain.snapshot.durable.manifest import Part
from elastrain.snapshot.durable.places.port import Sink, Source

FRAME_BYTES = 4 << 20
PAGE_BYTES = 4096
PAGED_FROM_BYTES = 64 << 10
"""Size from which an array fills whole pages of the file. Zeros follow its end."""
LEVEL = 1
PAYS_BELOW = 0.75
"""Limit of packed bytes over plain bytes. Frames that do not get below it are stored raw.

Trained fp32 numbers pack to 0.9 at 1 GB/s: a drive takes them faster when they are raw.
"""
_DTYPES = {
    16: "complex128",
    8: "float64 int64 uint64 complex64",
    4: "float32 int32 uint32 complex32",
    2: "bfloat16 float16 int16 uint16",
    1: "int8 uint8 bool float8_e4m3fn float8_e5m2",
}
ITEM_BYTES = {dtype: size_bytes for size_bytes, dtypes in _DTYPES.items() for dtype in dtypes.split()}
"""Bytes of an element by dtype. Names are those of torch without `torch.`."""
_LENGTH_BYTES = 8
_SLICES, _SLICE_BYTES = 4, 8 << 10
_TAIL_BYTES_MAX = 256 << 20


class FrameEntry(msgspec.Struct, frozen=True, array_like=True):
    """Description of one frame. Entries have the order of the file."""

    array: int
    plain_bytes: int
    stored_bytes: int
    """Bytes in the file, including the zeros that fill the last page."""
    packed: bool
    checksum: int
    """xxh3 (64 bits) of the stored bytes."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that are needed to read the frame into."""
        return self.plain_bytes if self.packed else self.stored_bytes


class Tail(msgspec.Struct, frozen=True, array_like=True):
    """The description at the end of a section. `arrays` has the dtype and element count of each array."""

    meta: bytes
    arrays: tuple[tuple[str, int], ...]
    frames: tuple[FrameEntry, ...]


_TAIL = msgspec.msgpack.Decoder(Tail)


def write(sink: Sink, file: str, meta: bytes, arrays: Sequence[tuple[str, memoryview]]) -> Part:
    """Append one section. `arrays` has the dtype and the bytes of each array.

    Raises what the sink raises, and ValueError for an unknown dtype.
    """
    unknown = [dtype for dtype, _ in arrays if dtype not in ITEM_BYTES]
    if unknown:
        raise ValueError(f"tensors of {unknown[0]} have no place in a checkpoint")
    offset = sink.size_bytes
    datas = [data for _, data in arrays]
    order = sorted(range(len(datas)), key=lambda index: not is_paged(datas[index].nbytes))
    written = tuple(_write(sink, index, each, datas[index].nbytes) for index in order for each in _pieces(datas[index]))
    kinds = tuple((dtype, data.nbytes // ITEM_BYTES[dtype]) for dtype, data in arrays)
    described = msgspec.msgpack.encode(Tail(meta, kinds, written))
    tail = len(described).to_bytes(_LENGTH_BYTES, "little") + described
    tail += bytes(-(sink.size_bytes + len(tail)) % PAGE_BYTES)
    sink.write(memoryview(tail))
    return Part(
        file=file,
        offset_bytes=offset,
        size_bytes=sink.size_bytes - offset,
        tail_bytes=len(tail),
        tail_checksum=xxhash.xxh3_64_intdigest(tail),
        plain_bytes=sum(frame.plain_bytes for frame in written),
    )


def read_tail(source: Source, part: Part, what: str) -> Tail:
    """Return the description at the end of a part. It is checked: its frames fill the part and the arrays exactly.

    `what` names the part in error messages. Raises DamagedError, and what the source raises.
    """
    tail = _decoded(source, part, what)
    wanted = [ITEM_BYTES.get(dtype, 0) * numel for dtype, numel in tail.arrays]
    plain = [0] * len(wanted)
    for frame in tail.frames:
        if not 0 <= frame.array < len(plain) or not _can_be(frame, wanted[frame.array]):
            raise _none(part, what, "it has a frame that cannot be")
        plain[frame.array] += frame.plain_bytes
    stored = sum(frame.stored_bytes for frame in tail.frames)
    if plain != wanted or stored + part.tail_bytes != part.size_bytes:
        raise _none(part, what, "its frames do not fill its arrays")
    return tail


def read_frames(
    source: Source, part: Part, tail: Tail, what: str, into: Callable[[FrameEntry], memoryview | None]
) -> None:
    """Read and check the frames of a part.

    `into` returns the memory for the next frame (`memory_bytes` of it), or None to skip the frame. Raises DamagedError,
    and what the source raises.
    """
    offset = part.offset_bytes
    for number, frame in enumerate(tail.frames):
        view = into(frame)
        if view is not None:
            _read(source, frame, offset, view, f"frame {number} of {what} in {part.file}")
        offset += frame.stored_bytes


def check(source: Source, part: Part, what: str) -> None:
    """Read and check the whole part, without keeping it. Raises DamagedError, and what the source raises."""
    tail = read_tail(source, part, what)
    scratch = memoryview(mmap.mmap(-1, max((frame.memory_bytes for frame in tail.frames), default=1)))
    read_frames(source, part, tail, what, lambda frame: scratch[: frame.memory_bytes])


def is_paged(size_bytes: int) -> bool:
    """Return True if an array of this size fills whole pages of a file."""
    return size_bytes >= PAGED_FROM_BYTES


def _can_be(frame: FrameEntry, array_bytes: int) -> bool:
    filled = -frame.plain_bytes % PAGE_BYTES if is_paged(array_bytes) else 0
    exact = frame.packed or frame.stored_bytes == frame.plain_bytes + filled
    return exact and 0 <= frame.plain_bytes <= FRAME_BYTES and 0 <= frame.stored_bytes <= FRAME_BYTES


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, data.nbytes, FRAME_BYTES):
        yield data[start : start + FRAME_BYTES]


def _write(sink: Sink, array: int, plain: memoryview, array_bytes: int) -> FrameEntry:
    packed = _packed(plain)
    data = plain if packed is None else packed
    zeros = bytes(-data.nbytes % PAGE_BYTES if is_paged(array_bytes) else 0)
    sink.write(data)
    checksum = xxhash.xxh3_64(data)
    if zeros:
        sink.write(memoryview(zeros))
        checksum.update(zeros)
    return FrameEntry(array, plain.nbytes, data.nbytes + len(zeros), packed is not None, checksum.intdigest())


def _packed(plain: memoryview) -> memoryview | None:
    """Return the frame compressed by zstd, or None if that saves too little."""
    if not _looks_packable(plain):
        return None
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(plain)
    return memoryview(packed) if len(packed) < PAYS_BELOW * plain.nbytes else None


def _looks_packable(plain: memoryview) -> bool:
    """Return True if some slices of the frame compress well. Frames that do not compress cost little this way."""
    apart = max(1, -(-plain.nbytes // _SLICES))
    sample = b"".join(plain[start : start + _SLICE_BYTES] for start in range(0, plain.nbytes, apart))
    return len(zstandard.ZstdCompressor(level=LEVEL).compress(sample)) < PAYS_BELOW * len(sample)


def _decoded(source: Source, part: Part, what: str) -> Tail:
    end = part.offset_bytes + part.size_bytes
    if source.size_bytes < end:
        raise DamagedError(f"{part.file} is cut short: {what} ends at byte {end:,}, the file at {source.size_bytes:,}")
    if part.tail_bytes > _TAIL_BYTES_MAX:
        raise _none(part, what, f"it would have {part.tail_bytes:,} bytes")
    raw = bytearray(part.tail_bytes)
    source.read_into(memoryview(raw), end - part.tail_bytes)
    if xxhash.xxh3_64_intdigest(raw) != part.tail_checksum:
        raise DamagedError(f"the description of {what} in {part.file} is damaged: its checksum differs")
    length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
    try:
        return _TAIL.decode(memoryview(raw)[_LENGTH_BYTES : _LENGTH_BYTES + length])
    except (ValueError, RecursionError) as error:
        raise _none(part, what, str(error)) from None


def _none(part: Part, what: str, why: str) -> DamagedError:
    return DamagedError(f"the description of {what} in {part.file} is none: {why}")


def _read(source: Source, frame: FrameEntry, offset: int, view: memoryview, what: str) -> None:
    raw = memoryview(bytearray(frame.stored_bytes)) if frame.packed else view
    source.read_into(raw, offset)
    if xxhash.xxh3_64_intdigest(raw) != frame.checksum:
        raise DamagedError(f"{what} is damaged: its checksum differs")
    if not frame.packed:
        return
    try:
        view[:] = unpacked(raw, frame.plain_bytes)
    except zstandard.ZstdError as error:
        raise DamagedError(f"{what} is damaged: it cannot be unpacked ({error})") from None
