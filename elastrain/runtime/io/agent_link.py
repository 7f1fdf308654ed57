"""This member and its agent: what it says during the job, and what the agent has said. Without a launcher, silence.

The worker's end of its agent's channel: typed messages both ways, over a UNIX socket with a handshake.

The agent's end is `launcher.line_socket`. They stay two: a worker may wait for its agent, and any of its threads may
send; an agent never waits for a worker, and takes descriptors. What both do alike is `base.line_buffer`.
"""

from __future__ import annotations

import math
import os
import socket
import threading
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

CONNECT_TIMEOUT_S = 20.0
SEND_TIMEOUT_S = 20.0


class ChannelClosedError(ConnectionError):
    """The agent is gone, or says what no agent says."""


class Channel:
    """Sending is thread-safe; receiving belongs to one thread."""

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
        self._socket.close()

    def _after_fork(self) -> None:
        """A data loader must not keep the agent believing that its worker lives."""
        if self._socket.fileno() >= 0:
            os.close(self._socket.detach())


def connect(environment: Environment) -> Channel | None:
    """The channel to this worker's agent; None without a launcher. Raises ConnectionError, RefusedError."""
    if environment.agent is None:
        return None
    try:
        secret, job, me = environment.secret, environment.scope, environment.member
        return Channel(environment.agent, secret=secret, job=job, member=me)
    except HandshakeRefused as refused:
        raise RefusedError(refused.reason) from None


class AgentLink:
    """Used by the engine's thread; `say` is safe from any. `channel` is None for a job of one."""

    def __init__(self, me: str, channel: Channel | None) -> None:
        self.me = me
        self._channel = channel
        self._is_readable = False
        self._told_holders: Placement | None = None

    @property
    def is_there(self) -> bool:
        return self._channel is not None

    def fileno(self) -> int:
        assert self._channel is not None
        return self._channel.fileno()

    def note_readable(self) -> None:
        """The mesh's poll has seen that something came; `heard` reads it afterwards."""
        self._is_readable = True

    def heard(self) -> list[am.ToWorker]:
        """What the agent has said since the last call. Raises StoppedError when it is gone."""
        if not self._is_readable or self._channel is None:
            return []
        self._is_readable = False
        try:
            return self._channel.receive()
        except ChannelClosedError as error:
            raise StoppedError(f"the launcher is gone ({error}); this worker stops") from error

    def say(self, message: am.FromWorker, *, fd: int | None = None) -> None:
        """`fd` travels beside the message. Raises ChannelClosedError."""
        if self._channel is not None:
            self._channel.send(message, fd=fd)

    def has_read(self, done_bytes: int, size_bytes: int) -> None:
        """Of the checkpoint that the job starts from. In silence where the agent is gone: the engine hears it, too."""
        with suppress(ChannelClosedError):
            self.say(am.Reading(done_bytes=done_bytes, size_bytes=size_bytes))

    def committed(self, record: Record, holders: Placement, micro_batch_s: float | None) -> None:
        """A step was committed. Holders are told when they have changed: by them the agents judge a loss."""
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


def mean_loss(record: Record) -> float | None:
    """Weighted mean over the global batch; None where nothing was weighed."""
    counted = record.contribution
    return counted.loss / counted.weight if counted.weight else None


def journalled(record: Record) -> dict[str, Any]:
    """What the journal keeps of a commit."""
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
