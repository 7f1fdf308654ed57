"""What this agent knows of durable checkpoints: the newest one, and which may become visible.

How far the job is, by all that this agent has heard; and why things happened, in a few sentences for `status`.

The window without redundancy, as this node's workers tell it: which shards are short of holders, and since when.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastrain.launcher.core.agent_events import CheckpointAnswered
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.shared.job_values import Command, Log, PutCheckpoint, Tell
from elastrain.protocol.agent_messages import (
    CheckpointEnded,
    CheckpointReady,
    CheckpointSettled,
    Progress,
    Redone,
    Window,
)

_REASONS_MAX = 8


class JobProgress:
    """How far the job is: only committed steps count."""

    def __init__(self) -> None:
        self.due = False
        """The first commit may have been made, on this node or another, also where nobody has told of it."""
        self.to_commit: set[str] = set()
        """Members of this node that wait with the first commit until the store knows that it is due."""
        self.begun = False
        """A step has been committed, on this node or another."""
        self.step: int | None = None
        self.loss: float | None = None
        self.samples: int | None = None
        self.redone_pairs = 0
        """How many (block, run) pairs pipelines have computed once more after losses."""
        self._redone_in = 0
        self._step_at_new_links: int | None = None
        self.reasons: list[str] = []
        """The newest last."""

    def note_new_links(self) -> None:
        """Note that members make the links between their nodes anew."""
        self._step_at_new_links = self.step

    @property
    def is_as_with_new_links(self) -> bool:
        """Whether no step has been committed since the links were made anew."""
        return self.step == self._step_at_new_links

    def take(self, message: Progress) -> None:
        if self.step is None or message.step > self.step:
            self.step, self.loss, self.samples = message.step, message.loss, message.samples

    def redo(self, message: Redone) -> list[Command]:
        """Count it once for the view, whichever of its members tells it first."""
        if message.generation <= self._redone_in:
            return []
        self._redone_in = message.generation
        self.redone_pairs += message.pairs
        return [Log(event="redone", fields={"step": message.step, "pairs": message.pairs})]

    def explain(self, reason: str) -> None:
        self.reasons = [*self.reasons, reason][-_REASONS_MAX:]


class CheckpointCare:
    """Owns what is known of durable checkpoints: members write them, the store decides which one is visible."""

    def __init__(self, life: int, progress: JobProgress) -> None:
        self._life, self._progress = life, progress
        self.newest: CheckpointEnded | None = None
        """The newest that is complete, by all that this agent has heard."""

    def on_ready(self, worker: Worker, message: CheckpointReady) -> list[Command]:
        """A member of this node has collected all parts of one. Whether its group is the job's, the store knows."""
        return [PutCheckpoint(member=worker.id, step=message.step, name=message.name, life=self._life)]

    def on_answered(self, event: CheckpointAnswered) -> list[Command]:
        return [Tell(member=event.member, message=CheckpointSettled(step=event.step, problem=event.problem))]

    def on_ended(self, message: CheckpointEnded) -> list[Command]:
        """Handle the end of a checkpoint, which only the member that collected it tells."""
        step = message.step
        if message.reason:
            say = f"the checkpoint of step {step} is given up, because {message.reason}"
            self._progress.explain(say)
        else:
            self.newest = message
            say = f"the checkpoint of step {step} is complete: {message.took_s:.1f} s, {_size(message.size_bytes)}"
        fields = {"step": step, "reason": message.reason, "took_s": message.took_s, "size_bytes": message.size_bytes}
        return [Log(event="checkpoint", fields=fields, say=say)]


def _size(size_bytes: int) -> str:
    """The size in words, with two digits at the least."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes} bytes"


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
