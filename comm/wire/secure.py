"""A proven TCP connection, from then on encrypted and guarded against any change: TLS 1.2 without certificates.

The handshake has shown that both ends know the job's secret, but binds nothing that is said afterwards to it. So the
ends agree on fresh keys (Diffie-Hellman, anonymous), and each shows, as the first thing inside, an HMAC over what
identifies these keys (`tls-unique`, RFC 5929) under the handshake's session key. Whoever stands in between has other
keys with each end, and can make neither HMAC. From then on TLS numbers, encrypts and authenticates every record
(AES-GCM): what is altered, repeated, dropped or put in ends the connection before any of it is parsed.

Not for UNIX sockets: there the kernel stands in between, and nobody else. Torch may never come in: the launcher uses
it.
"""

from __future__ import annotations

import errno
import functools
import hmac
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence

from elastrain.comm.errors import HandshakeRefused, Timeout
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.handshake import run as run_handshake

_CHUNK_BYTES = 256 << 10  # sealed or received at once: large enough for speed, small enough for the cache
_CIPHER = "ADH-AES128-GCM-SHA256:@SECLEVEL=0"  # level 0 admits suites without certificates, of which this is the one
_CONFIRMATION_BYTES = 32
_LABEL = b"elastrain tls 1 "
# ffdhe2048 of RFC 7919.
_GROUP = b"""-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
"""


class SecureSocket:
    """Takes over a connected TCP socket whose handshake is done, and is used like one; never blocks.

    `establish` comes first. Sending and receiving may belong to different threads.
    """

    family = socket.AF_INET

    def __init__(self, sock: socket.socket, handshake: Handshake) -> None:
        sock.setblocking(False)
        self._sock, self._handshake = sock, handshake
        self._arrived, self._sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        accepts = handshake.role is Role.ACCEPT
        self._tls = _context(handshake.role).wrap_bio(self._arrived, self._sealed, server_side=accepts)
        self._lock = threading.Lock()  # one TLS state serves both directions
        self._unsent = memoryview(b"")  # sealed bytes that the kernel has not taken
        self._unsent_plain_bytes = 0  # what they hold
        self._shaken = False
        self._end: EOFError | OSError | None = None  # why nothing more comes; what came before it is heard first
        self.holds_more = False
        """Whether bytes have arrived that the kernel knows nothing of any more: it will not say that they are here."""
        self.tamper: Callable[[memoryview], memoryview] | None = None
        """For faults on request: given bytes that were sealed, it gives what leaves instead."""

    def fileno(self) -> int:
        return self._sock.fileno()

    def setsockopt(self, level: int, option: int, value: int) -> None:
        self._sock.setsockopt(level, option, value)

    def close(self) -> None:
        self._sock.close()

    def establish(self) -> bool:
        """Go on with the exchange of keys; True once both ends are bound to the handshake.

        Raises HandshakeRefused, and OSError for a connection that ends or breaks.
        """
        try:
            while not self._shaken:
                self._shake()
            theirs = self._tls.read(_CONFIRMATION_BYTES)
        except ssl.SSLWantReadError:
            return self._take_more() and self.establish()
        except ssl.SSLError as error:
            raise HandshakeRefused(f"no encrypted connection came about ({error.reason})") from None
        other = Role.DIAL if self._handshake.role is Role.ACCEPT else Role.ACCEPT
        if not hmac.compare_digest(theirs, self._confirmation(other)):
            raise HandshakeRefused("somebody stands between the two ends: the keys of the connection are not theirs")
        self.holds_more = bool(self._arrived.pending or self._tls.pending())
        return True

    def _shake(self) -> None:
        try:
            self._tls.do_handshake()
            self._shaken = True
            self._tls.write(self._confirmation(self._handshake.role))
        finally:
            # A fresh connection takes a few kilobytes; if not, the other end is not one of ours.
            self._sock.sendall(self._sealed.read())

    def _confirmation(self, role: Role) -> bytes:
        keys = self._tls.get_channel_binding("tls-unique")
        assert keys is not None
        return hmac.digest(self._handshake.session_key(), _LABEL + role.value + keys, "sha256")

    def _take_more(self) -> bool:
        """What the kernel has now; False when that is nothing. Raises ConnectionResetError at the end."""
        if self._pull():
            return True
        if self._end is not None:
            raise ConnectionResetError(errno.ECONNRESET, "the other end closed the connection")
        return False

    def send(self, data: bytes | bytearray | memoryview) -> int:
        return self.sendmsg([memoryview(data)])

    def sendmsg(self, views: Sequence[memoryview], _rights: Sequence[object] = (), _flags: int = 0) -> int:
        """How many bytes, from the first on, the kernel has taken by now. Raises OSError, BlockingIOError among them.

        After BlockingIOError the next call must begin with the same bytes: they may be sealed already.
        """
        with self._lock:
            if not self._unsent:
                self._seal(views)
            self._unsent = self._unsent[self._sock.send(self._unsent, socket.MSG_NOSIGNAL) :]
            if self._unsent:
                raise BlockingIOError(errno.EAGAIN, "the kernel has no room for more")
            sent, self._unsent_plain_bytes = self._unsent_plain_bytes, 0
            return sent

    def _seal(self, views: Sequence[memoryview]) -> None:
        room = _CHUNK_BYTES
        for view in views:
            part = view[:room]
            if part:
                room -= self._tls.write(part)
            if not room:
                break
        self._unsent_plain_bytes = _CHUNK_BYTES - room
        sealed = memoryview(self._sealed.read())
        self._unsent = sealed if self.tamper is None else self.tamper(sealed)

    def recv(self, limit_bytes: int) -> bytes:
        came = bytearray(limit_bytes)
        return bytes(came[: self.recv_into(memoryview(came))])

    def recv_into(self, view: memoryview) -> int:
        """Fills as much of `view` as has arrived; 0 at the end. Raises OSError, BlockingIOError among them."""
        with self._lock:
            filled = 0
            while filled < len(view):
                size_bytes = self._open_into(view[filled:])
                filled += size_bytes
                if not size_bytes and not self._pull():
                    break
            self.holds_more = filled == len(view)
            if not filled and isinstance(self._end, OSError):
                raise self._end
            if not filled and self._end is None:
                raise BlockingIOError(errno.EAGAIN, "nothing has arrived")
            return filled

    def _open_into(self, view: memoryview) -> int:
        """0 when a whole record is missing, or the other end has said that nothing follows."""
        try:
            return int(self._tls.read(len(view), view))
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLZeroReturnError:
            self._end = EOFError()
            return 0
        except ssl.SSLError:
            raise ConnectionAbortedError(errno.EBADMSG, "bytes were altered on the way") from None

    def _pull(self) -> bool:
        if self._end is not None:
            return False
        try:
            data = self._sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end = error
            return False
        self._end = None if data else EOFError()
        self._arrived.write(data)
        return bool(data)


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
    secure = SecureSocket(sock, handshake)
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    try:
        while not secure.establish():
            if not poll.poll(max(deadline_s - time.monotonic(), 0) * 1000):
                raise Timeout(f"no encrypted connection came about within {timeout_s} s: the other end is stuck")
    except OSError as error:
        raise HandshakeRefused(f"the connection broke during the handshake ({error.strerror})") from error
    return secure


@functools.cache
def _context(role: Role) -> ssl.SSLContext:
    accepts = role is Role.ACCEPT
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if accepts else ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # who is there was proven before, and is bound to the keys afterwards
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2  # 1.3 has no suite without certificates
    context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION | ssl.OP_SINGLE_DH_USE
    context.set_ciphers(_CIPHER)
    if accepts:
        _load_group(context)
    return context


def _load_group(context: ssl.SSLContext) -> None:
    """From a file without a name: the library takes only a path."""
    fd = os.memfd_create("elastrain-dh-group", os.MFD_CLOEXEC)
    try:
        os.write(fd, _GROUP)
        context.load_dh_params(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
