"""A member's open tasks: what has come for each, what is ready, and what follows when something was computed.

Within a task, micro-batches go forward in order and backward in order: a block's gradients of a run are then added in
micro-batch order, whatever order its tensors come in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from elastrain.pipeline.actions import ActionKind, TaskAction, choose
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, Task


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What is fixed of a step: its number, its micro-batches, and how many of them make a run; blocks of the graph."""

    number: int
    micro_batches: int
    run_length: int
    blocks: int

    @property
    def runs(self) -> int:
        # Rounded up: the last run may be shorter, and its samples count like all others.
        return -(-self.micro_batches // self.run_length)

    def micro_batches_of(self, run: int) -> range:
        return range(run * self.run_length, min((run + 1) * self.run_length, self.micro_batches))

    def name(self, micro_batch: int, cut: int, direction: Direction) -> BoundaryName:
        return BoundaryName(self.number, micro_batch, cut, direction)


@dataclass(frozen=True, kw_only=True)
class TaskProgress:
    """How far a task has come: so many of its run's first micro-batches have gone forward, so many backward."""

    task: Task
    forwarded: int = 0
    done: int = 0


def wants(progress: TaskProgress, name: BoundaryName, shape: StepShape) -> bool:
    """Tell whether the task still has to read this boundary tensor."""
    # By what is left to do and not by what was sent: after a loss the same tensor may come from somebody else.
    micro_batches = shape.micro_batches_of(progress.task.run)
    if name.step != shape.number or name.micro_batch not in micro_batches:
        return False
    place = name.micro_batch - micro_batches.start
    if name.direction is Direction.ACTIVATION:
        return name.cut == progress.task.begin and place >= progress.forwarded
    return name.cut == progress.task.end and place >= progress.done


def needs(progress: TaskProgress, shape: StepShape) -> Iterable[BoundaryName]:
    """List the boundary tensors that the task still has to read. The batch and the loss are none."""
    task = progress.task
    micro_batches = shape.micro_batches_of(task.run)
    if task.begin > 0:
        for micro_batch in micro_batches[progress.forwarded :]:
            yield shape.name(micro_batch, task.begin, Direction.ACTIVATION)
    if task.end < shape.blocks:
        for micro_batch in micro_batches[progress.done :]:
            yield shape.name(micro_batch, task.end, Direction.GRADIENT)


def will_make(progress: TaskProgress, name: BoundaryName, shape: StepShape) -> bool:
    """Tell whether the task has still to make this boundary tensor."""
    micro_batches = shape.micro_batches_of(progress.task.run)
    if name.micro_batch not in micro_batches:
        return False
    place = name.micro_batch - micro_batches.start
    if name.direction is Direction.ACTIVATION:
        return name.cut == progress.task.end and place >= progress.forwarded
    return name.cut == progress.task.begin and place >= progress.done


@dataclass
class TaskDesk:
    """The tasks of one member in one step. Its driver computes what `next_action` says and tells it what came."""

    shape: StepShape
    limit: int
    progress: dict[Task, TaskProgress] = field(default_factory=dict)
    here: set[BoundaryName] = field(default_factory=set)
    """Boundary tensors that this member has, received ones and its own: it keeps them until it holds the record."""
    _has_open: bool | None = field(default=None, init=False, repr=False, compare=False)
    """Whether a task is open; None: to be looked up anew."""

    def hand_out(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            # A task that is handed out twice goes on where it is.
            self.progress.setdefault(task, TaskProgress(task=task))
        self._has_open = None

    def arrive(self, name: BoundaryName) -> bool:
        """Take note of a boundary tensor. False: it is of another step, and is to be dropped."""
        if name.step != self.shape.number:
            return False
        self.here.add(name)
        return True

    def next_action(self) -> TaskAction | None:
        return choose(self.ready(), self.in_flight(), self.limit)

    def ready(self) -> tuple[TaskAction, ...]:
        """What could begin now: of each task at most one forward and one backward."""
        found = []
        for progress in self.progress.values():
            if self._is_done(progress):
                continue
            for kind in ActionKind:
                action = self._next(progress, kind)
                if action is not None:
                    found.append(action)
        return tuple(found)

    def in_flight(self) -> tuple[Task, ...]:
        # One entry a micro-batch: it is their graphs that take memory, and the limit counts those.
        return tuple(p.task for p in self.progress.values() for _ in range(p.forwarded - p.done))

    def computed(self, action: TaskAction) -> BoundaryName | None:
        """Go on behind a computed action. Returns what it made, which whoever wants it has to be sent, or None."""
        # Counts are enough for a task's whole state, because its micro-batches go in order.
        before = self.progress[action.task]
        if action.kind is ActionKind.FORWARD:
            after = TaskProgress(task=before.task, forwarded=before.forwarded + 1, done=before.done)
            cut, direction, nobody = action.task.end, Direction.ACTIVATION, self.shape.blocks
        else:
            after = TaskProgress(task=before.task, forwarded=before.forwarded, done=before.done + 1)
            cut, direction, nobody = action.task.begin, Direction.GRADIENT, 0
        self.progress[action.task], self._has_open = after, None
        if cut == nobody:
            return None
        made = self.shape.name(action.micro_batch, cut, direction)
        # Kept until the record is held: after a loss somebody may need it again, and nobody else has it.
        self.here.add(made)
        return made

    def is_done(self, task: Task) -> bool:
        return self._is_done(self.progress[task])

    def has_open_tasks(self) -> bool:
        # Remembered, because this is asked several times after every event.
        if self._has_open is None:
            self._has_open = not all(map(self._is_done, self.progress.values()))
        return self._has_open

    def open_tasks(self) -> tuple[TaskProgress, ...]:
        """Those with something left to compute."""
        return tuple(progress for task, progress in self.progress.items() if not self.is_done(task))

    def _is_done(self, progress: TaskProgress) -> bool:
        # By backward alone: what has gone backward has gone forward before.
        return progress.done == len(self.shape.micro_batches_of(progress.task.run))

    def _next(self, progress: TaskProgress, kind: ActionKind) -> TaskAction | None:
        """The next micro-batch of the task in that direction, if all that it needs is here."""
        task = progress.task
        micro_batches = self.shape.micro_batches_of(task.run)
        if kind is ActionKind.FORWARD:
            place, there_are = progress.forwarded, len(micro_batches)
            cut, direction, is_given = task.begin, Direction.ACTIVATION, task.begin == 0
        else:
            # A forward and its backward are apart: in between other micro-batches may come.
            place, there_are = progress.done, progress.forwarded
            cut, direction, is_given = task.end, Direction.GRADIENT, task.end == self.shape.blocks
        if place >= there_are:
            return None
        micro_batch = micro_batches[place]
        if not is_given and self.shape.name(micro_batch, cut, direction) not in self.here:
            return None
        return TaskAction(kind, micro_batch, task)


def readers(tasks: Collection[TaskProgress], name: BoundaryName, shape: StepShape) -> tuple[str, ...]:
    """List the members that have to be sent a boundary tensor, each once."""
    # In order and not as a set: what is sent, and in which order, has to be the same when a log is played again.
    return tuple(dict.fromkeys(progress.task.member for progress in tasks if wants(progress, name, shape)))
