"""What a member of a pipeline does next: one pure rule over what is ready, and no schedule made beforehand.

Runs that were handed to somebody else, members of uneven length and slow ones are therefore no special cases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from elastrain.pipeline.plan import Task


class ActionKind(StrEnum):
    """What an action computes. A weight gradient by itself may come later."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, order=True)
class TaskAction:
    """The forward or the backward of one micro-batch through one task."""

    kind: ActionKind
    micro_batch: int
    task: Task


@dataclass(frozen=True, kw_only=True)
class NextAction:
    """The next action, or None to wait, and why."""

    action: TaskAction | None
    reason: str


def choose(ready: Collection[TaskAction], in_flight: Collection[Task], limit: int) -> NextAction:
    """Choose the backward of the lowest micro-batch; else the deepest forward within the limit; else wait.

    ready: what could begin now. in_flight: the task of each micro-batch that has been forwarded and not gone backward.
    limit: how many micro-batches may be in flight; at least 1.
    """
    # Nothing here knows a schedule: after a loss the tasks of a member are what they are, and the rule stays.
    backwards = [each for each in ready if each.kind is ActionKind.BACKWARD]
    if backwards:
        # A backward frees memory, and lets the members above go on; of two the deeper one has more of them above it.
        first = min(backwards, key=lambda each: (each.micro_batch, -each.task.begin, each.task))
        return NextAction(action=first, reason=f"micro-batch {first.micro_batch} is the lowest whose gradient is here")
    forwards = [each for each in ready if each.kind is ActionKind.FORWARD]
    allowed = [each for each in forwards if _held_back_by(each.task, in_flight) < limit]
    if allowed:
        # The deepest: it is nearest to the loss, and so to the backward that frees it.
        deepest = min(allowed, key=lambda each: (-each.task.begin, each.micro_batch, each.task))
        return NextAction(
            action=deepest, reason=f"no gradient is here; the forward at cut {deepest.task.begin} is deepest"
        )
    if forwards:
        return NextAction(action=None, reason=f"{len(in_flight)} forwards are in flight, and the limit is {limit}")
    return NextAction(action=None, reason="neither an activation nor a gradient is here")


def _held_back_by(task: Task, in_flight: Collection[Task]) -> int:
    # Only those that begin at its cut or deeper: they end without this forward. One that begins above it may wait for
    # this very forward, and if it held it back, both would wait for ever.
    return sum(other.begin >= task.begin for other in in_flight)
