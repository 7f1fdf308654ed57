"""Where workers and other agents come in. Nobody is heard before the handshake has proven the job's secret.

Hands proven connections on; what is then said is for `worker_processes` and `links`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from elastrain.base.event_loop import EventLoop
from elastrain.comm.wire.acceptor import Acceptor, AcceptorEvents, AcceptorLimits
from elastrain.comm.wire.handshake import Handshake, Role
from elastrain.comm.wire.secure import Connection
from elastrain.errors import ConfigError

_GREETINGS_MAX = 64
_GREETING_S = 5.0


def open_door(
    loop: EventLoop,
    listener: socket.socket,
    handshake: Callable[[], Handshake],
    admit: Callable[[str, Connection], str | None],
    log_refusal: Callable[[str], None],
) -> Acceptor:
    """`admit(name, connection)` takes a proven connection, or returns why not; `log_refusal` hears of the others."""
    events = AcceptorEvents(
        new_handshake=handshake, admit=lambda proven, sock: admit(proven.peer, sock), refused=log_refusal
    )
    limits = AcceptorLimits(introductions_max=_GREETINGS_MAX, handshake_timeout_s=_GREETING_S)
    return Acceptor(loop, [listener], events, limits)


def workers_handshake(
    secret: bytes, job: str, objection: Callable[[str], str | None] = lambda member: None
) -> Handshake:
    """Make the agent's end of a handshake with a worker. `objection(member)` says why it is not let in, or None."""
    made = Handshake(Role.ACCEPT, secret=secret, job=job, me="agent")
    made.objection = objection
    return made


def listen_abstract(name: str) -> socket.socket:
    """Raises ConfigError if the name is taken."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind("\0" + name)
    except OSError:
        listener.close()
        raise ConfigError(f"a job of this name already runs here ({name}): choose another --rdzv-id") from None
    listener.listen(128)
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """A new connection, non-blocking; None if it went away before it was served."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    sock.setblocking(False)
    return sock
