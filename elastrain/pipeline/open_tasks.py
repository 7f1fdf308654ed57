"""A member's open tasks: the tensors that came for each, the actions that are ready, and the effect of each action.

Within a task, micro-batches go forward in order and backward in order, and so do their weight gradients. A block's
gradients of a run are therefore added in micro-batch order, whatever order the tensors come in. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from elastrain.pipeline.actions import ActionKind, TaskAction, choose
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, Task


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The fixed numbers of a step: its number, its micro-batches, micro-batches per run, and blocks of the graph."""

    number: int
    micro_batches: int
    run_length: int
    blocks: int

    @property
    def runs(self) -> int:
        """Number of runs of the step."""
        # Rounded up: the last run may be shorter, and its samples count like all others.
        return -(-self.micro_batches // self.run_length)

    def micro_batches_of(self, run: int) -> range:
        """Return the micro-batches of a run."""
        return range(run * self.run_length, min((run + 1) * self.run_length, self.micro_batches))

    def name(self, micro_batch: int, cut: int, direction: Direction) -> BoundaryName:
        """Return the name of a boundary tensor of this step."""
        return BoundaryName(self.number, micro_batch, cut, direction)


@dataclass(frozen=True, kw_only=True)
class TaskProgress:
    """The progress of a task: how many micro-batches of its run have each of its three results."""

    task: Task
    forwarded: int = 0
    passed_back: int = 0
    """Micro-batches with the gradient of the task's input. The member above can go on with it."""
    done: int = 0
    """Micro-batches with all gradients. The others in flight still have their saved activations."""


def wants(progress: TaskProgress, name: BoundaryName, shape: StepShape) -> bool:
    """Return True if the task still has to read this boundary tensor."""
    # Decided by what is left to do, not by what was sent: after a loss the same tensor may come from another member.
    micro_batches = shape.micro_batches_of(progress.task.run)
    if name.step != shape.number or name.micro_batch not in micro_batches:
        return False
    place = name.micro_batch - micro_batches.start
    if name.direction is Direction.ACTIVATION:
        return name.cut == progress.task.begin and place >= progress.forwarded
    return name.cut == progress.task.end and place >= progress.passed_back


def needs(progress: TaskProgress, shape: StepShape) -> Iterable[BoundaryName]:
    """Yield the boundary tensors that the task still has to read. The batch and the loss are not among them."""
    task = progress.task
    micro_batches = shape.micro_batches_of(task.run)
    if task.begin > 0:
        for micro_batch in micro_batches[progress.forwarded :]:
            yield shape.name(micro_batch, task.begin, Direction.ACTIVATION)
    if task.end < shape.blocks:
        for micro_batch in micro_batches[progress.passed_back :]:
            yield shape.name(micro_batch, task.end, Direction.GRADIENT)


def will_make(progress: TaskProgress, name: BoundaryName, shape: StepShape) -> bool:
    """Return True if the task still has to make this boundary tensor."""
    micro_batches = shape.micro_batches_of(progress.task.run)
    if name.micro_batch not in micro_batches:
        return False
    place = name.micro_batch - micro_batches.start
    if name.direction is Direction.ACTIVATION:
        return name.cut == progress.task.end and place >= progress.forwarded
    return name.cut == progress.task.begin and place >= progress.passed_back


@dataclass
class TaskDesk:
    """The tasks of one member in one step.

    The caller computes what `next_action` returns, and reports it to `computed`.
    """

    shape: StepShape
    limit: int
    is_split: bool = False
    """True if a backward may leave the weight gradients to a later action. Backwards of first tasks are always whole:
    no member waits for their input gradient.
    """
    progress: dict[Task, TaskProgress] = field(default_factory=dict)
    here: set[BoundaryName] = field(default_factory=set)
    """Boundary tensors that this member has received or made. It keeps them until it holds the commit record."""
    _whole: set[tuple[int, int]] = field(default_factory=set, init=False, repr=False, compare=False)
    """Stretches whose backward was computed whole although it might have been split."""
    _has_open: bool | None = field(default=None, init=False, repr=False, compare=False)
    """True if a task is open; None if that has to be computed again."""

    def hand_out(self, tasks: Iterable[Task]) -> None:
        """Add tasks of this member."""
        for task in tasks:
            # A task that is handed out twice keeps its progress.
            self.progress.setdefault(task, TaskProgress(task=task))
        self._has_open = None

    def forget(self, tasks: Iterable[Task]) -> None:
        """Forget these tasks with their progress: they are handed out anew."""
        for task in tasks:
            self.progress.pop(task, None)
        self._has_open = None

    def arrive(self, name: BoundaryName) -> bool:
        """Note that a boundary tensor came. Returns False if it belongs to another step and is to be dropped."""
        if name.step != self.shape.number:
            return False
        self.here.add(name)
        return True

    def splits(self, task: Task) -> bool:
        """Return True if the task's backwards are to be split. The loop may still compute one whole."""
        return self.is_split and task.begin > 0 and (task.begin, task.end) not in self._whole

    def next_action(self, outstanding: Collection[TaskAction] = ()) -> TaskAction | None:
        """Return the action to compute now, or None if the member has to wait.

        Args:
            outstanding: Actions that the member computes before it, and that `computed` was not told of.
        """
        then = replace(self, progress=self._progress_after(outstanding)) if outstanding else self
        return choose(then.ready(), then.in_flight(), self.limit)

    def _progress_after(self, outstanding: Iterable[TaskAction]) -> dict[Task, TaskProgress]:
        progress = dict(self.progress)
        for action in outstanding:
            task, before = action.task, progress.get(action.task, TaskProgress(task=action.task))
            count = 1 + action.micro_batch - self.shape.micro_batches_of(task.run).start
            # A task that ends with the loss goes backward in the action of the forward.
            is_backward = action.kind is not ActionKind.FORWARD or task.end == self.shape.blocks
            is_whole = is_backward and (action.kind is ActionKind.WEIGHT or not self.splits(task))
            progress[task] = TaskProgress(
                task=task,
                forwarded=max(before.forwarded, count),
                passed_back=max(before.passed_back, count) if is_backward else before.passed_back,
                done=max(before.done, count) if is_whole else before.done,
            )
        return progress

    def ready(self) -> tuple[TaskAction, ...]:
        """Return the actions that could begin now: at most one of each kind of each task."""
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
        """Return the task of each micro-batch in flight: one entry for each micro-batch."""
        # The limit counts micro-batches, because their autograd graphs take the memory.
        return tuple(p.task for p in self.progress.values() for _ in range(p.forwarded - p.done))

    def computed(self, action: TaskAction, *, is_split: bool = False) -> BoundaryName | None:
        """Note that an action was computed. Returns the boundary tensor that it made and that readers need, or None.

        `is_split`: the action is a backward that has left its weight gradients to a later action. A whole backward has
        added those that earlier ones left, because they come first.
        """
        # Three counts are the whole state of a task, because its micro-batches go in order.
        task, before = action.task, self.progress[action.task]
        if action.kind is ActionKind.FORWARD:
            after = replace(before, forwarded=before.forwarded + 1)
        elif action.kind is ActionKind.BACKWARD:
            count = before.passed_back + 1
            after = replace(before, passed_back=count, done=before.done if is_split else count)
            if not is_split:
                self._whole.add((task.begin, task.end))
        else:
            # A whole backward may have come between the choice of this action and its turn.
            count = 1 + action.micro_batch - self.shape.micro_batches_of(task.run).start
            after = replace(before, done=max(before.done, count))
        self.progress[task], self._has_open = after, None
        is_forward = action.kind is ActionKind.FORWARD
        cut, direction = (task.end, Direction.ACTIVATION) if is_forward else (task.begin, Direction.GRADIENT)
        if action.kind is ActionKind.WEIGHT or cut in (0, self.shape.blocks):
            return None
        made = self.shape.name(action.micro_batch, cut, direction)
        # Kept until the commit record is held: after a loss a reader may need it again, and no other member may have
        # it.
        self.here.add(made)
        return made

    def is_done(self, task: Task) -> bool:
        """Return True if all micro-batches of the task have all of their gradients."""
        return self._is_done(self.progress[task])

    def has_open_tasks(self) -> bool:
        """Return True if any task of this member is not done."""
        # Cached, because this is asked several times after every event.
        if self._has_open is None:
            self._has_open = not all(map(self._is_done, self.progress.values()))
        return self._has_open

    def open_tasks(self) -> tuple[TaskProgress, ...]:
        """Return the tasks with something left to compute, with their progress."""
        return tuple(progress for task, progress in self.progress.items() if not self.is_done(task))

    def _is_done(self, progress: TaskProgress) -> bool:
        # This count is enough, because the others run ahead of it.
        return progress.done == len(self.shape.micro_batches_of(progress.task.run))

    def _next(self, progress: TaskProgress, kind: ActionKind) -> TaskAction | None:
        """Return the action for the task's next micro-batch of this kind, or None if it cannot begin yet.

        It can begin when its input is present and, for a backward, its forward is done. Weight gradients need nothing
        but their backward.
        """
        task = progress.task
        micro_batches = self.shape.micro_batches_of(task.run)
        if kind is ActionKind.FORWARD:
            place, there_are = progress.forwarded, len(micro_batches)
            cut, direction, is_given = task.begin, Direction.ACTIVATION, task.begin == 0
        elif kind is ActionKind.WEIGHT:
            place, there_are = progress.done, progress.passed_back
            cut, direction, is_given = task.begin, Direction.GRADIENT, True
        else:
            # A backward needs a forward that is done. Other micro-batches may come between the two.
            place, there_are = progress.passed_back, progress.forwarded
            cut, direction, is_given = task.end, Direction.GRADIENT, task.end == self.shape.blocks
        if place >= there_are:
            return None
        micro_batch = micro_batches[place]
        if not is_given and self.shape.name(micro_batch, cut, direction) not in self.here:
            return None
        return TaskAction(kind, micro_batch, task)


def readers(tasks: Collection[TaskProgress], name: BoundaryName, shape: StepShape) -> tuple[str, ...]:
    """Return the members that still need a boundary tensor, each once."""
    # Ordered, not a set: a replay of a log has to send the same tensors in the same order.
    return tuple(dict.fromkeys(progress.task.member for progress in tasks if wants(progress, name, shape)))
