"""Typed values to bytes and back: tagged kinds as lines of JSON, numbered kinds as MessagePack.

One library (msgspec) checks every field against its annotation while it parses, so that a kind needs no code but its
class. Bytes in, values out; what carries the bytes is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

# More than any traceback or list of holders needs; a bound, so that no peer can fill this process's memory.
LINE_BYTES_MAX = 1 << 20
Value = TypeVar("Value")


class BadMessageError(ValueError):
    """Bytes that no correct program of ours sends. The message says what is wrong with them."""


# Unknown fields are refused: a misspelt one would be a setting that nobody reads.
class Tagged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """Base of the kinds that a `LineCodec` tells apart: has no fields; the name of the class travels as `type`."""


class LineCodec(Generic[Value]):
    """`kinds` is a union of subclasses of `Tagged`: one value is one line of JSON. NaN and infinities become null."""

    def __init__(self, kinds: Any) -> None:
        # Made once: building one looks at all annotations of all kinds.
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
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
            # Its beginning is enough to know the sender by; a whole line could fill the log.
            raise BadMessageError(f"{error} (in {line[:80]!r})") from None
        except (ValueError, RecursionError) as error:  # a deep nesting costs the sender nothing
            raise BadMessageError(f"not a line of JSON ({error})") from None
        return value


# A type of its own and not plain int: only fields that need it pay for bytes instead of a number.
class BitMask(int):
    """A whole number that may have more than 64 bits, for a field of a numbered kind: MessagePack has none such."""


def decoder_of(kind: type[Value]) -> Callable[[bytes], Value]:
    """What reads one value as JSON, and raises ValueError for what is none."""
    decoder = msgspec.json.Decoder(kind)

    def decode(text: bytes) -> Value:
        try:
            return decoder.decode(text)
        except RecursionError:
            raise ValueError(f"no {kind.__name__} is nested so deeply") from None

    return decode


class NumberedCodec(Generic[Value]):
    """`kinds` maps classes of frozen values to the numbers that travel in a frame's head; bodies are MessagePack.

    Not JSON, which has neither NaN nor infinities: a gradient that overflows must read as what it is.
    """

    def __init__(self, kinds: Mapping[type[Value], int]) -> None:
        self._numbers = kinds
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
        self._decoders = {
            number: (kind, msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes)) for kind, number in kinds.items()
        }

    def encode(self, value: Value) -> tuple[int, bytes]:
        """`(number, body)`."""
        return self._numbers[type(value)], self._encoder.encode(value)

    def decode(self, number: int, body: bytes) -> Value:
        """The value. Raises BadMessageError."""
        if number not in self._decoders:
            raise BadMessageError(f"message kind {number} is unknown")
        kind, decoder = self._decoders[number]
        try:
            return decoder.decode(body)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadMessageError(f"malformed {kind.__name__} message: {error}") from None


def _plain(value: object) -> object:
    """Libraries subclass what JSON knows: torch's version is a str of its own, NumPy's float64 a float."""
    # Sent as the plain kind, because the other end need not have the library that subclassed it.
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"a {type(value).__name__} has no place in a message")


def _as_bytes(value: object) -> object:
    if isinstance(value, BitMask):
        return value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return _plain(value)


def _from_bytes(kind: type, value: object) -> BitMask:
    if kind is BitMask and isinstance(value, bytes):
        return BitMask.from_bytes(value, "little", signed=True)
    raise TypeError(f"expected bytes of a mask, got {type(value).__name__}")
