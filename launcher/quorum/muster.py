"""Words that hosts exchange before their etcd works: a small service on each host, over TLS with the job's authority.

A connection carries one question and one answer, a line of JSON each. TLS proves the secret before anything is parsed.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.core.quorum.founding import FoundingState
from elastrain.launcher.quorum.certificates import Pair

ANSWER_S = 1.0
"""Seconds for a connection, its TLS handshake, the question and the answer."""
_LINE_BYTES_MAX = 1 << 14
_THREADS = 4


@dataclass(frozen=True, kw_only=True)
class Greeting:
    """Answer of one agent: its job, its clock, its part in the founding, and the endpoints of the quorum it knows."""

    job: str
    node: str
    instance: str
    wall_s: float
    state: FoundingState | None = None
    endpoints: tuple[str, ...] = ()


class UnreachableError(ElastrainError):
    """A host does not answer. It may do so later."""


class StrangerError(ConfigError):
    """A host answers that does not belong to this job. Waiting does not help."""


_encode = msgspec.json.encode
_decode = msgspec.json.Decoder(Greeting, strict=True).decode


class Muster:
    """The service. `greet` is called in threads of the service and returns the answer."""

    def __init__(self, host: str, port: int, pair: Pair, greet: Callable[[], Greeting]) -> None:
        self._greet, self._context = greet, pair.context(server=True)
        self._listener = listen(host, port)
        self.port = int(self._listener.getsockname()[1])
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="elastrain-muster")
        self._accepting = threading.Thread(target=self._accept, name="elastrain-muster", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Stop the service."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._accepting.join(ANSWER_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
                self._threads.submit(self._answer, sock)
            except (OSError, RuntimeError):  # closed
                return

    def _answer(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(ANSWER_S)
            with self._context.wrap_socket(sock, server_side=True) as secured:
                _line(secured)
                secured.sendall(_encode(self._greet()) + b"\n")
        except (OSError, ValueError):
            sock.close()  # a stranger, or a host that has gone


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises ConfigError if the port cannot be used."""
    try:
        return socket.create_server((host.strip("[]"), port), family=_family(host))
    except OSError as error:
        raise ConfigError(
            f"port {port} of {host} cannot be used ({error.strerror}): end what listens there, or name another "
            "port by --join HOST:PORT"
        ) from None


def ask(host: str, port: int, pair: Pair, mine: Greeting) -> Greeting:
    """Return the greeting of the agent on this host.

    Raises UnreachableError, and StrangerError if the agent holds another secret or belongs to another job.
    """
    where = f"{host}:{port}"
    try:
        with socket.create_connection((host.strip("[]"), port), timeout=ANSWER_S) as sock:
            theirs = _exchange(sock, pair, mine, where)
    except StrangerError:
        raise
    except (OSError, ValueError) as error:
        raise UnreachableError(f"{where} does not answer ({error})") from None
    if theirs.job != mine.job:
        raise StrangerError(
            f"{where} belongs to job {theirs.job}, not to {mine.job}: choose another port by --join HOST:PORT"
        )
    return theirs


def _exchange(sock: socket.socket, pair: Pair, mine: Greeting, where: str) -> Greeting:
    try:
        with pair.context(server=False).wrap_socket(sock) as secured:
            secured.sendall(_encode({"job": mine.job, "node": mine.node}) + b"\n")
            return _decode(_line(secured))
    except (TimeoutError, ssl.SSLEOFError, ssl.SSLZeroReturnError):
        raise
    except ssl.SSLError as error:
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if any(word in reason for word in ("certificate", "unknown ca", "decrypt", "bad signature")):
            raise StrangerError(
                f"{where} holds another secret ({reason}): copy the secret file of one node to all of them (mode "
                "0600), or name it by --secret-file"
            ) from None
        raise StrangerError(
            f"{where} is answered by another program ({reason}), not by an agent: choose another port by --join "
            "HOST:PORT"
        ) from None


def _line(sock: ssl.SSLSocket) -> bytes:
    """Return the bytes before the first line feed. Raises ValueError if there is none, or the line is too long."""
    got = b""
    while not got.endswith(b"\n"):
        more = sock.recv(_LINE_BYTES_MAX)
        got += more
        if not more or len(got) > _LINE_BYTES_MAX:
            raise ValueError("no whole line")
    return got


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
