"""Typed values to bytes and back: tagged kinds as lines of JSON, single kinds as JSON or MessagePack.

One library (msgspec) checks every field against its annotation while it parses, so that a kind needs no code but its
class. Bytes in, values out; what carries the bytes is elsewhere.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

LINE_BYTES_MAX = 1 << 20
Value = TypeVar("Value")


class BadMessageError(ValueError):
    """Bytes that no correct program of ours sends. The message says what is wrong with them."""


class Tagged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """Base of the kinds that a `LineCodec` tells apart: has no fields; the name of the class travels as `type`."""


class LineCodec(Generic[Value]):
    """`kinds` is a union of subclasses of `Tagged`: one value is one line of JSON. NaN and infinities become null."""

    def __init__(self, kinds: Any) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kinds)

    def encode(self, value: Value) -> bytes:
        """The line with its end. Raises ValueError if it is longer than LINE_BYTES_MAX."""
        line = self._encoder.encode(value) + b"\n"
        if len(line) > LINE_BYTES_MAX:
            raise ValueError(f"a message of {len(line)} bytes is over the limit of {LINE_BYTES_MAX}")
        return line

    def decode(self, line: bytes) -> Value:
        """The value that the line holds. Raises BadMessageError."""
        try:
            value: Value = self._decoder.decode(line)
        except msgspec.ValidationError as error:
            raise BadMessageError(f"{error} (in {line[:80]!r})") from None
        except (ValueError, RecursionError) as error:  # a deep nesting costs the sender nothing
            raise BadMessageError(f"not a line of JSON ({error})") from None
        return value


class Document(Generic[Value]):
    """One kind of frozen value as a JSON object, for files and stores."""

    def __init__(self, kind: type[Value]) -> None:
        self._encoder = msgspec.json.Encoder()
        self._decoder = msgspec.json.Decoder(kind)

    def encode(self, value: Value) -> bytes:
        return self._encoder.encode(value)

    def decode(self, body: bytes) -> Value:
        """Raises BadMessageError."""
        try:
            return self._decoder.decode(body)
        except (ValueError, RecursionError) as error:
            raise BadMessageError(str(error)) from None
