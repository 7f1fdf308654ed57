"""The bytes of a frame, and an incremental parser for them. No sockets, no clock, no mesh.

    header   magic, version, kind, generation, lengths, tensor count, CRC-32 of what follows, CRC-32 of the header
    payload  tensor descriptors, then the body
    tensors  the raw elements of every inline tensor, one after the other

A tensor travels inline, or as a reference into a shared segment of the sender's. Every length is checked against the
caps before memory is taken for it. The CRCs find mistakes, not attackers, and none covers inline elements: between
hosts `secure` guards all bytes, on one host the kernel carries them.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.imports import Reference
from elastrain.comm.shm.shared_memory import begin_with_huge_pages

FIRST_CONTROL_KIND = 0xFF00  # kinds from here on belong to the links themselves

_MAGIC = b"ELFR"
_VERSION = 1
_HEADER = struct.Struct("<4sBxHQIIHxxII")
HEADER_BYTES = _HEADER.size
_HEADER_CRC = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("<BBBxIQQ")
_DIMENSIONS_MAX = 16
_STAGE_BYTES = 64 << 10
_MAPPED_BYTES = 32 << 20  # from this size on malloc maps memory anew each time

DTYPES: tuple[torch.dtype, ...] = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


@dataclass(frozen=True, kw_only=True)
class Caps:
    """Limits of what a frame may ask of its receiver."""

    max_body_bytes: int = 16 << 20
    max_tensor_bytes: int = 8 << 30  # all inline tensors of one frame together
    max_tensors: int = 4096


@dataclass(frozen=True, kw_only=True)
class Inline:
    """A tensor whose elements follow the payload."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RawFrame:
    """A parsed frame: inline tensors are whole, references are as they came."""

    kind: int
    generation: int
    body: bytes
    tensors: tuple[torch.Tensor | Reference, ...]


def dtype_supported(dtype: torch.dtype) -> bool:
    """Return True if tensors of this dtype can be sent."""
    return dtype in _CODES


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the elements of a contiguous CPU tensor as writable bytes, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type] # numpy's stubs lag


def encode(*, kind: int, generation: int, body: bytes, tensors: Sequence[Inline | Reference]) -> bytes:
    """Return header and payload. The elements of the inline tensors must follow, in order."""
    payload = b"".join(_encode_descriptor(tensor) for tensor in tensors)
    described_bytes = len(payload)
    payload += body
    header = _HEADER.pack(
        _MAGIC, _VERSION, kind, generation, described_bytes, len(body), len(tensors), zlib.crc32(payload), 0
    )
    header = header[: -_HEADER_CRC.size]
    return b"".join((header, _HEADER_CRC.pack(zlib.crc32(header)), payload))


def _encode_descriptor(tensor: Inline | Reference) -> bytes:
    dims, code = len(tensor.shape), _CODES[tensor.dtype]
    shape = struct.pack(f"<{dims}Q", *tensor.shape)
    if isinstance(tensor, Reference):
        return _DESCRIPTOR.pack(1, code, dims, tensor.segment, tensor.offset_bytes, tensor.token) + shape
    return _DESCRIPTOR.pack(0, code, dims, 0, 0, 0) + shape


def _decode_descriptors(payload: memoryview, count: int) -> list[Inline | Reference]:
    found: list[Inline | Reference] = []
    at = 0
    try:
        for _ in range(count):
            by_reference, code, dims, segment, offset_bytes, token = _DESCRIPTOR.unpack_from(payload, at)
            at += _DESCRIPTOR.size
            if by_reference > 1 or code >= len(DTYPES) or dims > _DIMENSIONS_MAX:
                raise ProtocolError(f"a tensor descriptor with dtype code {code} and {dims} dimensions")
            shape = struct.unpack_from(f"<{dims}Q", payload, at)
            at += 8 * dims
            if by_reference:
                where = {"segment": segment, "offset_bytes": offset_bytes, "token": token}
                found.append(Reference(dtype=DTYPES[code], shape=shape, **where))
            else:
                found.append(Inline(dtype=DTYPES[code], shape=shape))
    except struct.error:
        raise ProtocolError("the tensor descriptors are shorter than their count") from None
    if at != len(payload):
        raise ProtocolError("the tensor descriptors are longer than their count")
    return found


@dataclass(frozen=True, kw_only=True)
class _Header:
    kind: int
    generation: int
    described_bytes: int
    body_bytes: int
    tensor_count: int
    payload_crc: int


def _decode_header(data: bytearray, caps: Caps) -> _Header:
    magic, version, kind, generation, described_bytes, body_bytes, count, payload_crc, crc = _HEADER.unpack(data)
    if magic != _MAGIC or zlib.crc32(data[: -_HEADER_CRC.size]) != crc:
        raise ProtocolError("what arrived is not a frame")
    if version != _VERSION:
        raise ProtocolError(f"a frame of version {version} where {_VERSION} is spoken")
    if body_bytes > caps.max_body_bytes:
        raise ProtocolError(f"a body of {body_bytes} bytes, at most {caps.max_body_bytes} are allowed")
    if count > caps.max_tensors or described_bytes > count * (_DESCRIPTOR.size + 8 * _DIMENSIONS_MAX):
        raise ProtocolError(f"{count} tensors with {described_bytes} bytes of descriptors in one frame")
    return _Header(
        kind=kind,
        generation=generation,
        described_bytes=described_bytes,
        body_bytes=body_bytes,
        tensor_count=count,
        payload_crc=payload_crc,
    )


def _made_for(described: Inline) -> torch.Tensor:
    try:
        made = torch.empty(described.shape, dtype=described.dtype)
    except (RuntimeError, OverflowError, TypeError) as error:  # no memory for it, or dimensions that no tensor has
        raise ProtocolError(f"no tensor of shape {described.shape} can be made here: {error}") from error
    if made.nbytes >= _MAPPED_BYTES:
        begin_with_huge_pages(made.data_ptr(), made.nbytes)
    return made


class Parser:
    """Incremental parser of frames. Read bytes into `buffer()`, then pass their number to `received`."""

    def __init__(self, caps: Caps) -> None:
        self._caps = caps
        self._stage = memoryview(bytearray(_STAGE_BYTES))
        self._begin_frame()

    def _begin_frame(self) -> None:
        self._header: _Header | None = None
        self._payload: bytearray | None = None
        self._tensors: list[torch.Tensor | Reference] = []
        self._unread: list[torch.Tensor] = []  # inline tensors of this frame, last one first
        self._head = bytearray(HEADER_BYTES)
        self._aim(memoryview(self._head))

    def _aim(self, target: memoryview) -> None:
        self._target, self._filled = target, 0

    def buffer(self) -> memoryview:
        """Return the buffer for the next bytes: a large tensor or body itself, else a staging buffer."""
        rest = self._target[self._filled :]
        self._direct = len(rest) >= _STAGE_BYTES
        return rest if self._direct else self._stage

    def received(self, size_bytes: int, frames: list[RawFrame]) -> None:
        """`size_bytes` were written into the last `buffer()`; append every frame that is now whole.

        Raises ProtocolError; the stream is of no use then, but frames appended before are good.
        """
        data = self._stage[:0] if self._direct else self._stage[:size_bytes]
        if self._direct:
            self._filled += size_bytes
        while True:
            if self._filled == len(self._target):
                self._target_full(frames)
                continue
            if not data:
                return
            taken = min(len(data), len(self._target) - self._filled)
            self._target[self._filled : self._filled + taken] = data[:taken]
            self._filled += taken
            data = data[taken:]

    def _target_full(self, frames: list[RawFrame]) -> None:
        if self._header is None:
            self._header = _decode_header(self._head, self._caps)
            self._payload = bytearray(self._header.described_bytes + self._header.body_bytes)
            self._aim(memoryview(self._payload))
            return
        if self._payload is not None and not self._tensors:
            self._take_payload(self._header, self._payload)
        elif self._unread:
            self._unread.pop()
        if self._unread:
            self._aim(tensor_bytes(self._unread[-1]))
            return
        assert self._payload is not None
        body = bytes(memoryview(self._payload)[self._header.described_bytes :])
        header = self._header
        frames.append(RawFrame(kind=header.kind, generation=header.generation, body=body, tensors=tuple(self._tensors)))
        self._begin_frame()

    def _take_payload(self, header: _Header, payload: bytearray) -> None:
        if zlib.crc32(payload) != header.payload_crc:
            raise ProtocolError("a frame's payload does not match its checksum")
        described = _decode_descriptors(memoryview(payload)[: header.described_bytes], header.tensor_count)
        inline_bytes = sum(math.prod(d.shape) * d.dtype.itemsize for d in described if isinstance(d, Inline))
        if inline_bytes > self._caps.max_tensor_bytes:
            raise ProtocolError(
                f"a frame with {inline_bytes} bytes of tensors, at most {self._caps.max_tensor_bytes} are allowed"
            )
        for item in described:
            if isinstance(item, Reference):
                self._tensors.append(item)
            else:
                self._tensors.append(_made_for(item))
        self._unread = [t for t in reversed(self._tensors) if isinstance(t, torch.Tensor) and t.numel()]
