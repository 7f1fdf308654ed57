"""Requests by which a worker reads checkpoints, or a compile cache, from another node, and their encoding. No I/O.

A request is its length and JSON. An answer is a head (a success flag, and the length of the body) and a body: the data
that was read, or an error message.
"""

from __future__ import annotations

import struct

import msgspec

READER = "reader:"
"""Prefix of the name under which a worker connects to the agent of another node."""
REQUEST_BYTES_MAX = 4096
READ_BYTES_MAX = 16 << 20
_NAME_MAX, _DEPTH_MAX = 1024, 12
LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<BQ")


class Names(msgspec.Struct, frozen=True, kw_only=True, tag="names", forbid_unknown_fields=True):
    """A request for the names of the files in this checkpoint's folder. The answer is a JSON list."""

    checkpoint: str


class Size(msgspec.Struct, frozen=True, kw_only=True, tag="size", forbid_unknown_fields=True):
    """A request for the size of a file. The answer is the number of bytes, as JSON."""

    checkpoint: str
    file: str


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read", forbid_unknown_fields=True):
    """A request for `size_bytes` bytes of a file from `offset_bytes` on. Raises ValueError for impossible sizes."""

    checkpoint: str
    file: str
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.offset_bytes < 0 or not 0 < self.size_bytes <= READ_BYTES_MAX:
            raise ValueError(f"{self.size_bytes} bytes at {self.offset_bytes}: 1 to {READ_BYTES_MAX} can be read")


class CacheFiles(msgspec.Struct, frozen=True, kw_only=True, tag="cache-files", forbid_unknown_fields=True):
    """A request for names and sizes of the files in the node's compile cache. The answer is a JSON list of pairs."""

    stamp: str
    """Description of the asking machine; see `compile_cache.stamp`. Others' code is of no use to it."""


class CacheRead(msgspec.Struct, frozen=True, kw_only=True, tag="cache-read", forbid_unknown_fields=True):
    """A request for `size_bytes` bytes of a file of the compile cache. Raises ValueError for impossible sizes."""

    file: str
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.offset_bytes < 0 or not 0 < self.size_bytes <= READ_BYTES_MAX:
            raise ValueError(f"{self.size_bytes} bytes at {self.offset_bytes}: 1 to {READ_BYTES_MAX} can be read")


CheckpointRequest = Names | Size | Read
CacheRequest = CacheFiles | CacheRead
DiskRequest = CheckpointRequest | CacheRequest
_DECODER: msgspec.json.Decoder[DiskRequest] = msgspec.json.Decoder(DiskRequest)


def encode_request(request: DiskRequest) -> bytes:
    """Return the request as JSON, after its length."""
    body = msgspec.json.encode(request)
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> DiskRequest:
    """Parse a request without its length. Raises ValueError if the bytes are not a request."""
    try:
        return _DECODER.decode(body)
    except RecursionError:
        raise ValueError("no request is nested so deeply") from None


def is_cache_name(name: str) -> bool:
    """Return True if the name can be that of a file below a cache folder: relative, plain, and not hidden."""
    parts = name.split("/")
    return (
        len(name) <= _NAME_MAX
        and len(parts) <= _DEPTH_MAX
        and all(part and part[0] != "." and part.isascii() and part.isprintable() for part in parts)
    )
