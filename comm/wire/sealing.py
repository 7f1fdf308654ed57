"""Fresh keys of a TCP connection, the sealed records of each direction, and the buffer in which they arrive.

`secure` says how they are used. No I/O here, and no torch, because the launcher uses it.
"""

from __future__ import annotations

import hmac
import struct
from typing import TYPE_CHECKING

from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import Handshake, Role

if TYPE_CHECKING:  # imported late: a job on one host never needs it
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PLAIN_BYTES_MAX = 256 << 10
"""Bytes of a record's plain text at most: large enough for speed, small enough for the cache."""
_HEAD = struct.Struct("<I")  # bytes of the record's plain text
_TAG_BYTES = 16
_READ_AHEAD_BYTES = 4 << 10
_RECORDS_PER_KEY = 1 << 16  # 16 GiB: far below the amount for which one key of AES-GCM is safe
_HALF_BYTES = 32  # a public key of X25519, a value that shows the keys, and a direction's secret have this size
_KEY_BYTES = 16
_NONCE_BYTES = 12
_LABEL = b"elastrain records 1 "


class RecordKeys:
    """The keys and nonces of one direction. Each record takes one nonce; keys are replaced and forgotten in time."""

    def __init__(self, secret: bytes) -> None:
        self._secret, self._count = secret, 0
        self._cipher: AESGCM
        self._buffer = bytearray()

    def seal(self, plain: memoryview | bytes) -> memoryview:
        """Encrypt the next record and return it. It lies in a buffer that the next call uses again."""
        whole_bytes = _HEAD.size + len(plain) + _TAG_BYTES
        if len(self._buffer) < whole_bytes:
            self._buffer = bytearray(whole_bytes)
        record = memoryview(self._buffer)[:whole_bytes]
        _HEAD.pack_into(record, 0, len(plain))
        cipher, nonce = self._next()
        cipher.encrypt_into(nonce, plain, bytes(record[: _HEAD.size]), record[_HEAD.size :])
        return record

    def open(self, head: bytes, body: memoryview, into: memoryview) -> bool:
        """Decrypt the next record. Returns False if it is not the one that was sent; `into` means nothing then."""
        from cryptography.exceptions import InvalidTag

        cipher, nonce = self._next()
        try:
            cipher.decrypt_into(nonce, body, head, into)
        except InvalidTag:
            return False
        return True

    def _next(self) -> tuple[AESGCM, bytes]:
        """Return the cipher and the nonce of the next record."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        if self._count % _RECORDS_PER_KEY == 0:
            self._cipher = AESGCM(hmac.digest(self._secret, b"key", "sha256")[:_KEY_BYTES])
            self._secret = hmac.digest(self._secret, b"next", "sha256")
        nonce = self._count.to_bytes(_NONCE_BYTES, "little")
        self._count += 1
        return self._cipher, nonce


class KeyExchange:
    """Fresh keys for one connection. Both ends derive the same ones, if both know the handshake's session key.

    Each end sends `public`, then what `hear` returns, and receives `wants()` bytes until `done`.
    """

    def __init__(self, handshake: Handshake) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        self._handshake, self._private = handshake, X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self.done = False
        self.sends: RecordKeys
        self.receives: RecordKeys
        self._heard = b""
        self._expected: bytes | None = None  # what the other end has to show

    def wants(self) -> int:
        """Return how many more bytes to receive now: what follows the exchange are records."""
        return _HALF_BYTES - len(self._heard)

    def hear(self, data: bytes) -> bytes:
        """Take at most `wants()` bytes and return what is to be sent now.

        Raises HandshakeRefused if the other end's public key is invalid, or if it has other keys than this end.
        """
        self._heard += data
        if self.wants():
            return b""
        theirs, self._heard = self._heard, b""
        if self._expected is None:
            return self._agree(theirs)
        if not hmac.compare_digest(theirs, self._expected):
            raise HandshakeRefused("a third party stands between the two ends: the connection's keys are not theirs")
        self.done = True
        return b""

    def _agree(self, theirs: bytes) -> bytes:
        """Derive the keys and return the value by which this end shows that it has them."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
        except ValueError:
            raise HandshakeRefused("no encrypted connection came about: the other end's key is invalid") from None
        dials = self._handshake.role is Role.DIAL
        keys = self.public + theirs if dials else theirs + self.public
        salt = self._handshake.session_key()
        made = HKDF(SHA256(), 4 * _HALF_BYTES, salt, _LABEL + keys).derive(shared)
        parts = [made[start : start + _HALF_BYTES] for start in range(0, len(made), _HALF_BYTES)]
        (mine, show), (other, self._expected) = (parts[:2], parts[2:]) if dials else (parts[2:], parts[:2])
        self.sends, self.receives = RecordKeys(mine), RecordKeys(other)
        return show


class SealedBytes:
    """Sealed bytes that have arrived, in one buffer from which a record is decrypted."""

    def __init__(self) -> None:
        self._buffer = bytearray(_READ_AHEAD_BYTES)
        self._start = self._stop = 0

    @property
    def _plain_bytes(self) -> int | None:
        """The size that the first record states for itself, or None while its head is not here."""
        if self._stop - self._start < _HEAD.size:
            return None
        return int(_HEAD.unpack_from(self._buffer, self._start)[0])

    @property
    def _needed_bytes(self) -> int:
        """The size of the first record, sealed, or that of its head while that is not here."""
        plain_bytes = self._plain_bytes
        return _HEAD.size if plain_bytes is None else _HEAD.size + plain_bytes + _TAG_BYTES

    @property
    def is_sane(self) -> bool:
        """False if the first record states a size that no record has."""
        plain_bytes = self._plain_bytes
        return plain_bytes is None or 0 < plain_bytes <= PLAIN_BYTES_MAX

    @property
    def is_whole(self) -> bool:
        """True if the first record is here whole."""
        return self.is_sane and _HEAD.size < self._needed_bytes <= self._stop - self._start

    def room(self) -> memoryview:
        """Return where to receive: what the first record lacks and the head of the next, or a few kilobytes."""
        held_bytes, former = self._stop - self._start, memoryview(self._buffer)[self._start : self._stop]
        wanted_bytes = max(self._needed_bytes + _HEAD.size, _READ_AHEAD_BYTES)
        if self._start or wanted_bytes > len(self._buffer):  # then little is held: nothing large lies behind a record
            if wanted_bytes > len(self._buffer):
                self._buffer = bytearray(wanted_bytes)
            self._buffer[:held_bytes] = bytes(former)
            self._start, self._stop = 0, held_bytes
        return memoryview(self._buffer)[held_bytes:wanted_bytes]

    def came(self, size_bytes: int) -> None:
        """Count bytes that were received into `room`."""
        self._stop += size_bytes

    def record(self) -> tuple[bytes, memoryview, int] | None:
        """Return the first record's head, its sealed body and its plain size, or None while it is not here whole."""
        if not self.is_whole:
            return None
        body = self._start + _HEAD.size
        whole = memoryview(self._buffer)[: self._start + self._needed_bytes]
        return bytes(whole[self._start : body]), whole[body:], len(whole) - body - _TAG_BYTES

    def drop(self) -> None:
        """Forget the first record."""
        self._start += self._needed_bytes
