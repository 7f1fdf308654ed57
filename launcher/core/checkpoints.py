"""What this agent knows of durable checkpoints: the newest one, and which may become visible."""

from __future__ import annotations

from elastrain.agent_messages import CheckpointEnded, CheckpointReady, CheckpointSettled
from elastrain.launcher.core.events import CheckpointAnswered
from elastrain.launcher.core.job_progress import JobProgress
from elastrain.launcher.core.worker_table import Worker
from elastrain.launcher.values import Command, Log, PutCheckpoint, Tell


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
