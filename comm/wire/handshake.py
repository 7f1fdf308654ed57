"""Mutual proof that both ends of a fresh connection know the job's secret, before anything else is said.

Three messages and a welcome, each a type byte, a length and at most 512 bytes; all four together stay under 1 KiB:

    dialer   -> HELLO    nonce, generation, job, name
    acceptor -> ANSWER   nonce, generation, job, name, HMAC("accept" + both hellos)
    dialer   -> PROOF    HMAC("dial" + both hellos)
    acceptor -> WELCOME

The HMAC (SHA-256) covers the role, both nonces, the job, both names and both generations, so that a proof can neither
be replayed nor reflected. Nothing is encrypted here; over TCP, `secure` goes on from the session key. The secret must
be random: an eavesdropper can test guesses of a weak one. A missing secret (None) is the empty one: it keeps strange
jobs apart, but keeps no attacker out; use it on one host only.

`Handshake` does no I/O; `dial` runs it over a plain socket. Torch may never come in: the launcher uses it.
"""

from __future__ import annotations

import enum
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastrain.comm.errors import HandshakeRefused, Timeout

_VERSION = 2
_LABEL, _SESSION_LABEL = b"elastrain link 1 ", b"elastrain session 1 "
_NONCE_BYTES = 16
_MAC_BYTES = 32
_NAME_BYTES_MAX = 100
_MESSAGE_BYTES_MAX = 512
_HEAD = struct.Struct("<BH")
_HELLO = struct.Struct(f"<B{_NONCE_BYTES}sQBB")


class Role(enum.Enum):
    """End of a handshake."""

    DIAL = b"dial"
    ACCEPT = b"accept"


class _Message(enum.IntEnum):
    HELLO = 1
    ANSWER = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5


# What each role expects next; None: finished.
_NEXT: dict[tuple[Role, _Message], _Message | None] = {
    (Role.DIAL, _Message.ANSWER): _Message.WELCOME,
    (Role.DIAL, _Message.WELCOME): None,
    (Role.ACCEPT, _Message.HELLO): _Message.PROOF,
    (Role.ACCEPT, _Message.PROOF): None,
}


@dataclass(frozen=True, kw_only=True)
class _Hello:
    nonce: bytes
    generation: int
    job: str
    name: str

    def encode(self) -> bytes:
        job, name = self.job.encode(), self.name.encode()
        return _HELLO.pack(_VERSION, self.nonce, self.generation, len(job), len(name)) + job + name


def _decode_hello(data: bytes) -> _Hello:
    if len(data) < _HELLO.size:
        raise HandshakeRefused("the greeting is too short to come from elastrain")
    version, nonce, generation, job_bytes, name_bytes = _HELLO.unpack_from(data)
    if version != _VERSION:
        raise HandshakeRefused(f"the other end speaks version {version}, this one {_VERSION}: install the same release")
    text = data[_HELLO.size :]
    if len(text) != job_bytes + name_bytes or max(job_bytes, name_bytes) > _NAME_BYTES_MAX:
        raise HandshakeRefused("the greeting's lengths do not add up")
    try:
        return _Hello(nonce=nonce, generation=generation, job=text[:job_bytes].decode(), name=text[job_bytes:].decode())
    except UnicodeDecodeError:
        raise HandshakeRefused("the greeting's names are not UTF-8") from None


class Handshake:
    """One end of the exchange, without I/O.

    Send `bytes_to_send()`, read exactly `wants()` bytes, hand them to `receive()`, until `done`. When `receive` raises
    HandshakeRefused, send what is left in `bytes_to_send()` (it tells the other end why) and close.

    `expect`: the name that must answer; None accepts every name.
    """

    def __init__(
        self, role: Role, *, secret: bytes | None, job: str, me: str, generation: int = 0, expect: str | None = None
    ) -> None:
        for what, text in (("job", job), ("member", me)):
            if not 0 < len(text.encode()) <= _NAME_BYTES_MAX:
                raise ValueError(f"a {what} name has 1 to {_NAME_BYTES_MAX} bytes; got {text!r}")
        self.role = role
        self.objection: Callable[[str], str | None] = lambda name: None
        """Function that returns why a proven dialler is refused, or None. The dialler is told the reason."""
        self._key = secret or b""
        self._expect = expect
        self._mine = _Hello(nonce=os.urandom(_NONCE_BYTES), generation=generation, job=job, name=me)
        self._theirs: _Hello | None = None
        self._next: _Message | None = _Message.ANSWER if role is Role.DIAL else _Message.HELLO
        self._in = bytearray()
        self._out = bytearray()
        if role is Role.DIAL:
            self._say(_Message.HELLO, self._mine.encode())

    @property
    def done(self) -> bool:
        """True once both ends are proven; bytes_to_send() may still hold the last message."""
        return self._next is None

    @property
    def peer(self) -> str:
        """The other end's name; proven only when `done`."""
        return self._theirs.name if self._theirs else ""

    @property
    def peer_generation(self) -> int:
        """The other end's generation."""
        return self._theirs.generation if self._theirs else 0

    def session_key(self) -> bytes:
        """Return 32 bytes that only the two ends of this handshake have. They differ for every handshake."""
        assert self.done
        return hmac.digest(self._key, _SESSION_LABEL + self._hellos(), "sha256")

    def bytes_to_send(self) -> bytes:
        """Return the bytes to send now; they count as sent."""
        out = bytes(self._out)
        self._out.clear()
        return out

    def wants(self) -> int:
        """Return the number of bytes to read now. Reading more would take bytes of the next protocol."""
        if self.done:
            return 0
        if len(self._in) < _HEAD.size:
            return _HEAD.size - len(self._in)
        return _HEAD.size + int(_HEAD.unpack_from(self._in)[1]) - len(self._in)

    def receive(self, data: bytes) -> None:
        """Take at most `wants()` bytes. Raises HandshakeRefused; ValueError when given more than asked for."""
        if len(data) > self.wants():
            raise ValueError(f"{len(data)} bytes given, {self.wants()} wanted")
        self._in += data
        if len(self._in) < _HEAD.size:
            return
        kind, length = _HEAD.unpack_from(self._in)
        try:
            self._check_head(kind, length)
            if len(self._in) == _HEAD.size + length:
                body = bytes(self._in[_HEAD.size :])
                self._in.clear()
                self._take(_Message(kind), body)
        except HandshakeRefused as refusal:
            if kind != _Message.REFUSE:
                self._say(_Message.REFUSE, refusal.reason.encode()[:_MESSAGE_BYTES_MAX])
            raise

    def _check_head(self, kind: int, length: int) -> None:
        if kind not in (self._next, _Message.REFUSE) or length > _MESSAGE_BYTES_MAX:
            raise HandshakeRefused("the other end does not speak elastrain's handshake: check address and port")

    def _take(self, kind: _Message, body: bytes) -> None:
        if kind is _Message.REFUSE:
            words = "".join(c for c in body.decode(errors="replace") if c.isprintable())
            raise HandshakeRefused(f"the other end says: {words}")
        if kind is _Message.HELLO:
            self._meet(_decode_hello(body))
            self._say(_Message.ANSWER, self._mine.encode() + self._mac(Role.ACCEPT))
        elif kind is _Message.ANSWER:
            self._meet(_decode_hello(body[:-_MAC_BYTES]))
            self._verify(Role.ACCEPT, body[-_MAC_BYTES:])
            self._say(_Message.PROOF, self._mac(Role.DIAL))
        elif kind is _Message.PROOF:
            self._verify(Role.DIAL, body)
            if (reason := self.objection(self.peer)) is not None:
                raise HandshakeRefused(reason)
            self._say(_Message.WELCOME, b"")
        self._next = _NEXT[self.role, kind]

    def _meet(self, theirs: _Hello) -> None:
        if theirs.job != self._mine.job:
            raise HandshakeRefused(f"this is job {self._mine.job!r}, the other end belongs to {theirs.job!r}")
        if self._expect is not None and theirs.name != self._expect:
            raise HandshakeRefused(f"{self._expect!r} was expected here, {theirs.name!r} answered")
        self._theirs = theirs

    def _mac(self, role: Role) -> bytes:
        return hmac.digest(self._key, _LABEL + role.value + self._hellos(), "sha256")

    def _hellos(self) -> bytes:
        assert self._theirs is not None
        hellos = (self._mine, self._theirs) if self.role is Role.DIAL else (self._theirs, self._mine)
        return b"".join(struct.pack("<H", len(h.encode())) + h.encode() for h in hellos)

    def _verify(self, role: Role, mac: bytes) -> None:
        if not hmac.compare_digest(self._mac(role), mac):
            raise HandshakeRefused(
                f"{self._mine.name!r} and {self.peer!r} hold different secrets for job {self._mine.job!r}: "
                "give both the same one"
            )

    def _say(self, kind: _Message, body: bytes) -> None:
        self._out += _HEAD.pack(kind, len(body)) + body


def dial(
    sock: socket.socket, *, secret: bytes | None, job: str, me: str, timeout_s: float, expect: str | None = None
) -> str:
    """Run the dialling end over a connected stream socket and return the peer's name.

    Reads not one byte beyond the handshake. Raises HandshakeRefused, Timeout; the caller closes the socket then.
    """
    return run(sock, Handshake(Role.DIAL, secret=secret, job=job, me=me, expect=expect), timeout_s)


def run(sock: socket.socket, handshake: Handshake, timeout_s: float) -> str:
    """Run one end over a connected stream socket, waiting for the other. Raises HandshakeRefused, Timeout."""
    before_s = sock.gettimeout()
    deadline_s = time.monotonic() + timeout_s
    try:
        while True:
            _send(sock, handshake.bytes_to_send(), deadline_s)
            if handshake.done:
                return handshake.peer
            sock.settimeout(max(deadline_s - time.monotonic(), 1e-6))
            data = sock.recv(handshake.wants())
            if not data:
                raise HandshakeRefused("the other end closed the connection during the handshake")
            try:
                handshake.receive(data)
            except HandshakeRefused:
                _send(sock, handshake.bytes_to_send(), deadline_s)
                raise
    except TimeoutError:
        raise Timeout(
            f"the handshake was not finished within {timeout_s} s: the other end is stuck or not ours"
        ) from None
    except OSError as error:
        raise HandshakeRefused(f"the connection broke during the handshake ({error.strerror})") from error
    finally:
        sock.settimeout(before_s)


def _send(sock: socket.socket, data: bytes, deadline_s: float) -> None:
    if data:  # even of nothing, an end that has refused and gone would make a broken pipe
        sock.settimeout(max(deadline_s - time.monotonic(), 1e-6))
        sock.sendall(data)
