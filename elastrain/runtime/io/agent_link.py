"""The worker's end of its agent's channel: typed messages both ways, over a UNIX socket with a handshake.

`AgentLink` is the worker's interface; without a launcher it sends and receives nothing. The agent's end is
`launcher.shared.line_socket`. They stay separate: a worker may wait for its agent and send from any thread; an agent
never waits for a worker, and receives descriptors. `base.line_files` has the common part.
"""

from __future__ import annotations

import math
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from elastrain.base.environment import Environment
from elastrain.base.line_files import LineBuffer
from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import dial
from elastrain.errors import RefusedError, StoppedError
from elastrain.job.placement import Placement
from elastrain.job.values import Record
from elastrain.protocol import agent_messages as am
from elastrain.protocol.agent_messages import FROM_WORKER, TO_WORKER, FromWorker, ToWorker
from elastrain.protocol.codec import LINE_BYTES_MAX
from elastrain.runtime.io.work_report import WorkReport

CONNECT_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 20.0


class ChannelClosedError(ConnectionError):
    """The agent is gone, or has sent an invalid message."""


class Channel:
    """The socket to the agent. Sending is thread-safe; only one thread may receive."""

    def __init__(self, address: str, *, secret: bytes | None, job: str, member: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._socket.connect("\0" + address)
        dial(self._socket, secret=secret, job=job, me=member, timeout_s=CONNECT_TIMEOUT_S)
        self._socket.settimeout(SEND_TIMEOUT_S)
        self._lock = threading.Lock()
        self._lines = LineBuffer(LINE_BYTES_MAX)
        os.register_at_fork(after_in_child=self._after_fork)

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    def send(self, message: FromWorker, *, fd: int | None = None) -> None:
        """Send one message; `fd` travels beside it. Raises ChannelClosedError."""
        line = FROM_WORKER.encode(message)
        with self._lock:
            try:
                if fd is not None:
                    sent = socket.send_fds(self._socket, [line], [fd])
                    line = line[sent:]
                self._socket.sendall(line)
            except OSError as error:
                raise ChannelClosedError(f"the agent does not answer: {error}") from error

    def receive(self) -> list[ToWorker]:
        """Return all messages that are there, without waiting. Raises ChannelClosedError when the agent is gone."""
        try:
            data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise ChannelClosedError(f"the agent does not answer: {error}") from error
        if not data:
            raise ChannelClosedError("the agent has closed the channel")
        try:
            return [TO_WORKER.decode(line) for line in self._lines.feed(data)]
        except ValueError as error:
            raise ChannelClosedError(f"the agent sent what no agent sends: {error}") from error

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _after_fork(self) -> None:
        """Close the socket in a forked child.

        Otherwise a loader process would make the agent believe that its worker lives.
        """
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())


def connect(environment: Environment) -> Channel | None:
    """Connect to this worker's agent. Returns None without a launcher. Raises ConnectionError, RefusedError."""
    if environment.agent is None:
        return None
    try:
        secret, job, me = environment.secret, environment.scope, environment.member
        return Channel(environment.agent, secret=secret, job=job, member=me)
    except HandshakeRefused as refused:
        raise RefusedError(refused.reason) from None


class AgentLink:
    """The messages between this worker and its agent. `channel` is None for a job of one.

    `work` is what the agent shows of this worker; None reports nothing.

    The engine's thread uses it; any thread may call `say`.
    """

    def __init__(self, me: str, channel: Channel | None, work: WorkReport | None = None) -> None:
        self.me = me
        self._work = work
        self._channel = channel
        self._is_readable = False
        self._told_holders: Placement | None = None

    @property
    def is_there(self) -> bool:
        """True if there is an agent."""
        return self._channel is not None

    def fileno(self) -> int:
        """Return the descriptor of the channel."""
        assert self._channel is not None
        return self._channel.fileno()

    def note_readable(self) -> None:
        """Note that the mesh's poll found the channel readable; `heard` reads it afterwards."""
        self._is_readable = True

    def heard(self) -> list[am.ToWorker]:
        """Return the agent's messages since the last call. Raises StoppedError if the agent is gone."""
        if not self._is_readable or self._channel is None:
            return []
        self._is_readable = False
        try:
            return self._channel.receive()
        except ChannelClosedError as error:
            raise StoppedError(f"the launcher is gone ({error}); this worker stops") from error

    def say(self, message: am.FromWorker, *, fd: int | None = None) -> None:
        """Send one message; `fd` travels beside it. Raises ChannelClosedError."""
        if self._channel is not None:
            self._channel.send(message, fd=fd)

    def begin_work(self, until: int) -> None:
        """Note the end of the loop, which the agent shows."""
        if self._work is not None:
            self._work.begin(until)

    def measure_memory(self, measured: Callable[[], int | None], limit_bytes: int | None) -> None:
        """Let the agent show the memory that `measured` returns in bytes, against this limit."""
        if self._work is not None:
            self._work.measure(measured, limit_bytes)

    def has_read(self, done_bytes: int, size_bytes: int) -> None:
        """Report progress in reading the initial checkpoint.

        Does nothing if the agent is gone: the engine notices that, too.
        """
        with suppress(ChannelClosedError):
            self.say(am.Reading(done_bytes=done_bytes, size_bytes=size_bytes))

    def committed(self, record: Record, holders: Placement, micro_batch_s: float | None) -> None:
        """Report a committed step. Holders are sent when they have changed, because agents judge a loss by them."""
        loss = mean_loss(record)
        news = None if holders == self._told_holders else {str(shard): h.all for shard, h in enumerate(holders)}
        self._told_holders = holders
        self.say(
            am.Progress(
                step=record.step,
                loss=loss if loss is not None and math.isfinite(loss) else None,
                samples=record.contribution.samples,
                micro_batch_s=micro_batch_s,
                holders=news,
            )
        )
        if self.is_there and self._work is not None and (told := self._work.take()) is not None:
            self.say(told)


def mean_loss(record: Record) -> float | None:
    """Return the weighted mean loss of the global batch, or None if its weight is 0."""
    counted = record.contribution
    return counted.loss / counted.weight if counted.weight else None


def journalled(record: Record) -> dict[str, Any]:
    """Return the fields of a commit that the journal keeps."""
    counted = record.contribution
    return {
        "step": record.step,
        "generation": record.generation,
        "loss": mean_loss(record),
        "samples": counted.samples,
        "fingerprint": counted.fingerprint,
        "skipped": record.skipped,
        "loss_scale": record.scaler.scale,
    }
