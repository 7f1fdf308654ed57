"""The window without redundancy, as this node's workers tell it: which shards are short of holders, and since when."""

from __future__ import annotations

from collections.abc import Mapping

from elastrain.agent_messages import Window
from elastrain.launcher.values import Command, Log


class OpenWindow:
    """Owns what was last told. All members tell the same of one moment, sooner or later."""

    def __init__(self) -> None:
        self.short: Mapping[str, int] = {}
        """Shard -> how many living holders it has."""
        self.since_step: int | None = None
        self.since_s: float | None = None
        """When this agent heard of it, in monotonic seconds; None while the window is closed."""
        self._step = -1

    def take(self, member: str, message: Window, now: float) -> list[Command]:
        """Returns a line for the event log where the window has opened or closed."""
        # A slower member tells again what a faster one has told of a step that is over.
        if message.step < self._step:
            return []
        was_open = self.since_s is not None
        self._step, self.short = message.step, message.short
        if message.short:
            self.since_step = message.since_step
            self.since_s = now if self.since_s is None else self.since_s
            return [] if was_open else [self._log(member, "opened", shards=len(message.short), step=message.step)]
        since_s, self.since_s = self.since_s, None
        # Both are counted from the loss: the step that was open then is one of them.
        steps = message.step - (self.since_step if self.since_step is not None else message.step)
        return [] if since_s is None else [self._log(member, "closed", after_s=now - since_s, after_steps=steps)]

    def described(self, now: float) -> dict[str, object] | None:
        """The open window in words for `status`; None while every shard has its holders."""
        if self.since_s is None:
            return None
        return {"shards": dict(self.short), "since_step": self.since_step, "since_s": now - self.since_s}

    def _log(self, member: str, what: str, **fields: object) -> Log:
        return Log(event="window", fields={"window": what, "member": member, **fields})
