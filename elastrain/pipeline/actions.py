"""What a member of a pipeline does next: one pure rule over what is ready, and no schedule made beforehand.

Runs that were handed to somebody else, members of uneven length and slow ones are therefore no special cases.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from elastrain.pipeline.pipeline_plan import Task


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


def choose(ready: Collection[TaskAction], in_flight: Collection[Task], limit: int) -> TaskAction | None:
    """Choose the backward of the lowest micro-batch; else the deepest forward within the limit; else wait.

    ready: what could begin now. in_flight: the task of each micro-batch that has been forwarded and not gone backward.
    limit: how many micro-batches may be in flight; at least 1.
    """
    # Nothing here knows a schedule: after a loss the tasks of a member are what they are, and the rule stays.
    backwards = [each for each in ready if each.kind is ActionKind.BACKWARD]
    if backwards:
        # A backward frees memory, and lets the members above go on; of two the deeper one has more of them above it.
        return min(backwards, key=lambda each: (each.micro_batch, -each.task.begin, each.task))
    forwards = [each for each in ready if each.kind is ActionKind.FORWARD]
    allowed = [each for each in forwards if _held_back_by(each.task, in_flight) < limit]
    # The deepest: it is nearest to the loss, and so to the backward that frees it.
    return min(allowed, key=lambda each: (-each.task.begin, each.micro_batch, each.task), default=None)


def _held_back_by(task: Task, in_flight: Collection[Task]) -> int:
    # Only those that begin at its cut or deeper: they end without this forward. One that begins above it may wait for
    # this very forward, and if it held it back, both would wait for ever.
    return sum(other.begin >= task.begin for other in in_flight)
