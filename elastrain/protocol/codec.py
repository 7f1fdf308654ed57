"""Encoding of typed values: tagged kinds as lines of JSON, numbered kinds as MessagePack. No I/O.

msgspec checks every field against its annotation while it parses, so a new kind needs only a class.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

# More than any traceback or list of holders needs. The bound keeps a peer from filling this process's memory.
LINE_BYTES_MAX = 1 << 20
Value = TypeVar("Value")


class BadMessageError(ValueError):
    """An error about bytes that no correct elastrain program sends. The message says what is wrong with them."""


# Unknown fields are refused, because a misspelt one would be a setting without effect.
class Tagged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True, tag_field="type"):
    """Base class of the kinds that a `LineCodec` distinguishes.

    It has no fields; the class's name is sent as `type`.
    """


class LineCodec(Generic[Value]):
    """A codec that writes each value as one line of JSON. NaN and infinities become null.

    `kinds` is a union of subclasses of `Tagged`.
    """

    def __init__(self, kinds: Any) -> None:
        # Made once, because building one inspects all annotations of all kinds.
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._decoder = msgspec.json.Decoder(kinds)

    def encode(self, value: Value) -> bytes:
        """Return the line with its end. Raises ValueError if it is longer than LINE_BYTES_MAX."""
        line = self._encoder.encode(value) + b"\n"
        if len(line) > LINE_BYTES_MAX:
            raise ValueError(f"a message of {len(line)} bytes is over the limit of {LINE_BYTES_MAX}")
        return line

    def decode(self, line: bytes) -> Value:
        """Return the value that the line holds. Raises BadMessageError."""
        try:
            value: Value = self._decoder.decode(line)
        except msgspec.ValidationError as error:
            # The beginning is enough to recognize the sender; a whole line could fill the log.
            raise BadMessageError(f"{error} (in {line[:80]!r})") from None
        except (ValueError, RecursionError) as error:  # a deep nesting costs the sender nothing
            raise BadMessageError(f"not a line of JSON ({error})") from None
        return value


# A type of its own and not plain int, so that only fields that need it are sent as bytes.
class BitMask(int):
    """An integer that may have more than 64 bits, for a field of a numbered kind. MessagePack has no such integers."""


def decoder_of(kind: type[Value]) -> Callable[[bytes], Value]:
    """Return a function that reads one value as JSON, and raises ValueError for other text."""
    decoder = msgspec.json.Decoder(kind)

    def decode(text: bytes) -> Value:
        try:
            return decoder.decode(text)
        except RecursionError:
            raise ValueError(f"no {kind.__name__} is nested so deeply") from None

    return decode


def remembering(kind: type[Value], remembered: int) -> Callable[[bytes], Value]:
    """Return a decoder that remembers the values of the last texts. The values are shared, and must be frozen."""
    return functools.lru_cache(maxsize=remembered)(decoder_of(kind))


class NumberedCodec(Generic[Value]):
    """A codec that writes each value as MessagePack, with a number for its class in the frame's head.

    `kinds` maps classes of frozen values to these numbers. JSON cannot be used, because it has neither NaN nor
    infinities: a gradient that overflows must be read as what it is.
    """

    def __init__(self, kinds: Mapping[type[Value], int]) -> None:
        self._numbers = kinds
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
        self._decoders = {
            number: (kind, msgspec.msgpack.Decoder(kind, dec_hook=_from_bytes)) for kind, number in kinds.items()
        }

    def encode(self, value: Value) -> tuple[int, bytes]:
        """Return `(number, body)`."""
        return self._numbers[type(value)], self._encoder.encode(value)

    def decode(self, number: int, body: bytes) -> Value:
        """Return the value. Raises BadMessageError."""
        if number not in self._decoders:
            raise BadMessageError(f"message kind {number} is unknown")
        kind, decoder = self._decoders[number]
        try:
            return decoder.decode(body)
        except (ValueError, TypeError, RecursionError) as error:
            raise BadMessageError(f"malformed {kind.__name__} message: {error}") from None


def _plain(value: object) -> object:
    """Return the value as a plain str, int or float.

    Libraries subclass these types: torch's version is a subclass of str, NumPy's float64 one of float.
    """
    # The other end may lack the library that subclassed the type.
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
