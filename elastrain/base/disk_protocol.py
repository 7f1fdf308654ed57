"""How a worker reads from the disk of another node: requests and answers as bytes. No I/O.

A request is a length and JSON. An answer is a head (whether it went well, and its length) and a body: what was read,
or a sentence that says why not.
"""

from __future__ import annotations

import struct

import msgspec

READER = "reader:"
"""Begins the name under which a worker knocks at the door of another node's agent."""
REQUEST_BYTES_MAX = 4096
READ_BYTES_MAX = 16 << 20
LENGTH = struct.Struct("<I")
ANSWER = struct.Struct("<BQ")


class Names(msgspec.Struct, frozen=True, kw_only=True, tag="names", forbid_unknown_fields=True):
    """Answer: the names of the files in this checkpoint's folder, as a JSON list."""

    checkpoint: str


class Size(msgspec.Struct, frozen=True, kw_only=True, tag="size", forbid_unknown_fields=True):
    """Answer: the file's size in bytes, as JSON."""

    checkpoint: str
    file: str


class Read(msgspec.Struct, frozen=True, kw_only=True, tag="read", forbid_unknown_fields=True):
    """Answer: so many bytes of the file. Raises ValueError for sizes that cannot be."""

    checkpoint: str
    file: str
    offset_bytes: int
    size_bytes: int

    def __post_init__(self) -> None:
        if self.offset_bytes < 0 or not 0 < self.size_bytes <= READ_BYTES_MAX:
            raise ValueError(f"nobody reads {self.size_bytes} bytes from {self.offset_bytes} on")


DiskRequest = Names | Size | Read
_DECODER: msgspec.json.Decoder[DiskRequest] = msgspec.json.Decoder(DiskRequest)


def encode_request(request: DiskRequest) -> bytes:
    """With its length."""
    body = msgspec.json.encode(request)
    return LENGTH.pack(len(body)) + body


def decode_request(body: bytes) -> DiskRequest:
    """Raises ValueError for what is none."""
    try:
        return _DECODER.decode(body)
    except RecursionError:
        raise ValueError("no request is nested so deeply") from None
