"""The rule by which a member of a pipeline chooses its next action. Pure; there is no schedule made beforehand.

The rule looks only at what is ready. Runs handed to another member, chains of uneven length and slow members therefore
need no special cases.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple

from elastrain.pipeline.pipeline_plan import Task


class ActionKind(StrEnum):
    """The kind of computation of an action."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The whole backward, or only the gradient of the task's input where the backward is split."""
    WEIGHT = "weight"
    """The gradients of the parameters, where the backward is split."""


class TaskAction(NamedTuple):
    """One computation of a micro-batch through one task."""

    kind: ActionKind
    micro_batch: int
    task: Task


def choose(ready: Collection[TaskAction], in_flight: Collection[Task], limit: int) -> TaskAction | None:
    """Choose the backward of the lowest micro-batch, else the deepest forward within the limit, else a weight gradient.

    Returns None if the member has to wait.

    Args:
        ready: Actions that could begin now.
        in_flight: One task for each micro-batch whose forward is done and whose last gradient is not.
        limit: The number of micro-batches that may be in flight, at least 1.
    """
    # The rule uses no schedule, so it also holds after a loss has changed the member's tasks.
    backward = forward = weight = None
    for each in ready:
        if each.kind is ActionKind.FORWARD:
            # The deepest forward is nearest to the loss, and so to the backward that frees its memory. Fewer tasks hold
            # it back than any other forward.
            if forward is None or _depth(each) < _depth(forward):
                forward = each
        elif each.kind is ActionKind.BACKWARD:
            if backward is None or _age(each) < _age(backward):
                backward = each
        elif weight is None or _age(each) < _age(weight):
            weight = each
    # A backward frees memory and lets the members above go on.
    if backward is not None:
        return backward
    if forward is not None and (len(in_flight) < limit or _held_back_by(forward.task, in_flight) < limit):
        return forward
    # A weight gradient fills a bubble. It runs at the latest when a forward needs the memory of its micro-batch.
    return weight


def _depth(action: TaskAction) -> tuple[int, int, Task]:
    return -action.task.begin, action.micro_batch, action.task


def _age(action: TaskAction) -> tuple[int, int, Task]:
    # The deeper of two tasks has more members above it.
    return action.micro_batch, -action.task.begin, action.task


def _held_back_by(task: Task, in_flight: Collection[Task]) -> int:
    # Count only tasks that end behind this cut: they wait only for forwards that begin deeper. A task that ends at the
    # cut or before it may wait for this very forward. If that task held it back, both would wait forever. Tasks that
    # begin before the cut count too, because runs with different cuts would pile up side by side otherwise.
    return sum(other.end > task.begin for other in in_flight)
