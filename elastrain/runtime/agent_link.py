"""This member and its agent: what it says during the job, and what the agent has said. Without a launcher, silence."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from elastrain import agent_messages as am
from elastrain.errors import StoppedError
from elastrain.placement import Placement
from elastrain.runtime.channel import Channel, ChannelClosedError
from elastrain.values import Record


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
