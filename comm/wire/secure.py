"""A proven TCP connection whose bytes are encrypted, and guarded against any change.

The handshake has shown that both ends know the job's secret, but binds nothing that is said afterwards to it. So the
ends agree on fresh keys: X25519, then HKDF over what both calculate and the handshake's session key. Each end shows, as
its first words, a value that only the holder of these keys can derive. An attacker between the two ends has other keys
with each of them and does not know the session key, so it can show neither value.

From then on the connection carries records: a length, at most 256 KiB encrypted by AES-128-GCM, and a tag. Each
direction has a key of its own, and a record's number is its nonce. A record that is altered, repeated, dropped or put
in ends the connection before any of it is parsed. The sender encrypts from the tensor's memory into one buffer, and the
receiver decrypts from one buffer into the tensor's memory: nothing else is copied.

UNIX sockets stay as they are: the kernel alone stands between their ends. This module never imports torch, because the
launcher uses it.

A proven connection for a thread that waits: all bytes are sent, or exactly so many received.

Torch may never come in: the launcher uses it.
"""

from __future__ import annotations

import errno
import itertools
import select
import socket
import time
from collections.abc import Callable, Sequence

from elastrain.comm.errors import HandshakeRefused, Timeout
from elastrain.comm.wire.handshake import Handshake
from elastrain.comm.wire.handshake import run as run_handshake
from elastrain.comm.wire.sealing import PLAIN_BYTES_MAX, KeyExchange, SealedBytes

_ALONE_BYTES = 32 << 10  # a piece from this size on is encrypted where it lies; smaller neighbours are joined


class SecureSocket:
    """Takes over a connected TCP socket whose handshake is done, and is used like one; never blocks.

    `establish` comes first. Sending and receiving may belong to different threads, one for each.
    """

    family = socket.AF_INET

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._keys = KeyExchange(handshake)
        self._sock.sendall(self._keys.public)  # a fresh connection takes a few dozen bytes
        self._unsent = memoryview(b"")  # of a record, what the kernel has not taken
        self._unsent_plain_bytes = 0
        self._arrived = SealedBytes()
        self._plain = memoryview(b"")  # decrypted, and not asked for yet
        self._end: EOFError | OSError | None = None  # why nothing more comes; what came before it is heard first
        self.tamper: Callable[[memoryview], memoryview] | None = None
        """For faults on request: given a sealed record, it returns the bytes that leave instead."""

    @property
    def holds_more(self) -> bool:
        """Return True if there are bytes to receive of which the kernel will not tell any more."""
        return bool(self._plain) or self._arrived.is_whole or self._end is not None

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the socket."""
        self._sock.setsockopt(level, option, value)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def establish(self) -> bool:
        """Go on with the exchange of keys. Returns True once both ends have shown that they have the same keys.

        Raises HandshakeRefused, and OSError for a connection that ends or breaks.
        """
        while not self._keys.done:
            try:
                data = self._sock.recv(self._keys.wants())
            except BlockingIOError:
                return False
            if not data:
                raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
            self._sock.sendall(self._keys.hear(data))
        return True

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Send bytes as `sendmsg` does."""
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, views: Sequence[memoryview], _rights: Sequence[object] = (), _flags: int = 0) -> int:
        """Return how many bytes, from the first on, the kernel has taken. Raises OSError, BlockingIOError among them.

        After BlockingIOError the next call must begin with the same bytes, because they may be encrypted already.
        """
        if not self._unsent:
            self._seal(_chosen(views))
        self._unsent = self._unsent[self._sock.send(self._unsent, socket.MSG_NOSIGNAL) :]
        if self._unsent:
            raise BlockingIOError(errno.EAGAIN, "the kernel has no room for more")
        sent, self._unsent_plain_bytes = self._unsent_plain_bytes, 0
        return sent

    def _seal(self, plain: memoryview | bytes) -> None:
        record = self._keys.sends.seal(plain)
        self._unsent_plain_bytes = len(plain)
        self._unsent = record if self.tamper is None else self.tamper(record)

    def recv(self, limit_bytes: int) -> bytes:
        """Return at most `limit_bytes` bytes; raises as `recv_into`."""
        came = bytearray(limit_bytes)
        return bytes(memoryview(came)[: self.recv_into(memoryview(came))])

    def recv_into(self, view: memoryview) -> int:
        """Fill as much of `view` as has arrived and return its size; 0 at the end.

        Raises OSError, BlockingIOError among them. After an error the contents of `view` mean nothing.
        """
        filled = 0
        while filled < len(view):
            size_bytes = self._open_into(view[filled:])
            filled += size_bytes
            if not size_bytes and not self._pull():
                break
        if not filled and isinstance(self._end, OSError):
            raise self._end
        if not filled and self._end is None:
            raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
        return filled

    def _open_into(self, view: memoryview) -> int:
        """Return how many bytes of the next record went into `view`; 0 while that record is not whole."""
        if not self._plain:
            sealed = self._arrived.record()
            if sealed is None:
                return 0
            head, body, plain_bytes = sealed
            fits = plain_bytes <= len(view)
            into = view[:plain_bytes] if fits else memoryview(bytearray(plain_bytes))
            if not self._keys.receives.open(head, body, into):
                self._fail()
                return 0
            self._arrived.drop()
            if fits:
                return plain_bytes
            self._plain = into
        size_bytes = min(len(view), len(self._plain))
        view[:size_bytes], self._plain = self._plain[:size_bytes], self._plain[size_bytes:]
        return size_bytes

    def _fail(self) -> None:
        """End the connection for what arrives: nothing behind an altered record is worth anything."""
        self._end = ConnectionAbortedError(errno.EBADMSG, "bytes were altered on the way")
        self._arrived = SealedBytes()

    def _pull(self) -> bool:
        """Take what the kernel has. Returns False if that is nothing, or if nothing more will come."""
        if not self._arrived.is_sane:
            self._fail()
        if self._end is not None:
            return False
        try:
            size_bytes = self._sock.recv_into(self._arrived.room())
        except BlockingIOError:
            return False
        except OSError as error:
            self._end = error
            return False
        self._arrived.came(size_bytes)
        self._end = None if size_bytes else EOFError()
        return bool(size_bytes)


def _chosen(views: Sequence[memoryview]) -> memoryview | bytes:
    """Return the plain text of the next record: a large piece where it lies, or small ones joined."""
    if len(views) == 1 or len(views[0]) >= _ALONE_BYTES:
        return views[0][:PLAIN_BYTES_MAX]
    small = itertools.takewhile(lambda view: len(view) < _ALONE_BYTES, views)
    return b"".join(small)[:PLAIN_BYTES_MAX]


Connection = socket.socket | SecureSocket
"""A proven connection: a UNIX socket, or what is made of a TCP socket."""


def dial(sock: socket.socket, handshake: Handshake, timeout_s: float) -> Connection:
    """Run the dialling end over a connected socket, waiting for the other; the caller closes `sock` if this raises.

    Raises HandshakeRefused, Timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    run_handshake(sock, handshake, timeout_s)
    if sock.family == socket.AF_UNIX:
        return sock
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    try:
        secure = SecureSocket(sock, handshake)
        while not secure.establish():
            if not poll.poll(max(deadline_s - time.monotonic(), 0) * 1000):
                raise Timeout(f"no encrypted connection came about within {timeout_s} s: the other end is stuck")
    except OSError as error:
        raise HandshakeRefused(f"the connection broke during the handshake ({error.strerror})") from error
    return secure


class BlockingStream:
    """A stream over a connection that never blocks, for one thread at a time. `timeout_s` limits each wait."""

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s

    def send(self, data: bytes | bytearray | memoryview) -> None:
        """Send all of `data`. Raises OSError, Timeout."""
        rest = memoryview(data)
        while rest.nbytes:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                self._wait(select.POLLOUT)

    def receive_into(self, view: memoryview) -> None:
        """Fill `view`. Raises EOFError if the other end closed the connection, OSError, Timeout."""
        rest = view
        while rest.nbytes:
            try:
                size_bytes = self._connection.recv_into(rest)
            except BlockingIOError:
                self._wait(select.POLLIN)
                continue
            if not size_bytes:
                raise EOFError("the other end has closed the connection")
            rest = rest[size_bytes:]

    def receive(self, size_bytes: int) -> bytes:
        """Return exactly `size_bytes` bytes. Raises as `receive_into`."""
        data = bytearray(size_bytes)
        self.receive_into(memoryview(data))
        return bytes(data)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _wait(self, events: int) -> None:
        if isinstance(self._connection, SecureSocket) and events == select.POLLIN and self._connection.holds_more:
            return
        poll = select.poll()
        poll.register(self._connection.fileno(), events)
        if not poll.poll(self._timeout_s * 1000):
            raise Timeout(f"nothing moved for {self._timeout_s:g} s: the other end is stuck")
