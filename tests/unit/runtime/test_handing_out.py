"""What the loop made enters the books before the core hears of it, unless its attempt is void."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from elastrain import protocol as p
from elastrain.buffers.captures import Boundaries
from elastrain.buffers.slots import GradientSlots
from elastrain.pipeline.actions import ActionKind, TaskAction
from elastrain.pipeline.pipeline_plan import BoundaryName, Direction, Task
from elastrain.protocol.messages import Boundary
from elastrain.runtime.engine.slot_assignment import SlotAssignment
from elastrain.runtime.io.loop_channel import BoundaryMade, TaskAssignment

TASK = Task(run=0, begin=0, end=2, member="m0")
NAME = BoundaryName(3, 0, 2, Direction.ACTIVATION)


def bench() -> tuple[SlotAssignment, Any, list[TaskAssignment]]:
    given: list[TaskAssignment] = []
    slots = GradientSlots(SimpleNamespace(new_slot=lambda: SimpleNamespace(release=list)))  # type: ignore[arg-type]
    books = SimpleNamespace(slots=slots, boundaries=Boundaries())
    handing = SlotAssignment(SimpleNamespace(books=books), SimpleNamespace(give=given.append))  # type: ignore[arg-type]
    return handing, books, given


def made(tensors: tuple[Any, ...]) -> BoundaryMade:
    message = Boundary(name=NAME, tensors=(), contribution=None)
    action = TaskAction(ActionKind.FORWARD, 0, TASK)
    return BoundaryMade(event=p.Computed(step=3, action=action, made=message, is_last=False), tensors=tensors)


def test_a_task_has_one_slot_for_all_its_actions_and_gets_what_it_begins_with() -> None:
    handing, books, given = bench()
    handing.give(p.Forward(step=3, task=TASK, micro_batch=0))
    handing.note(p.Ready())
    message = Boundary(name=BoundaryName(3, 0, 2, Direction.GRADIENT), tensors=(), contribution=None)
    books.boundaries.put(message, ("gradient",))
    handing.give(p.Backward(step=3, task=TASK, micro_batch=0))
    assert given[0].slot is given[1].slot
    assert given[0].received is None
    assert given[1].received is not None and given[1].received.tensors == ("gradient",)


def test_what_was_made_in_an_attempt_that_is_void_stands_for_nothing() -> None:
    handing, books, _ = bench()
    handing.give(p.Forward(step=3, task=TASK, micro_batch=0))
    books.slots.void_step()
    handing.keep(made(("wrong",)))
    handing.note(p.Ready())
    handing.give(p.Forward(step=3, task=TASK, micro_batch=0))
    handing.keep(made(("right",)))
    assert books.boundaries[NAME].tensors == ("right",)


def test_the_end_of_a_void_task_leaves_the_slot_of_the_same_task_in_the_next_attempt() -> None:
    handing, books, given = bench()
    handing.give(p.Forward(step=3, task=TASK, micro_batch=0))
    books.slots.void_step()
    handing.give(p.Forward(step=3, task=TASK, micro_batch=0))
    handing.note(p.Computed(step=3, action=TaskAction(ActionKind.BACKWARD, 0, TASK), made=None, is_last=True))
    handing.note(p.Ready())
    handing.give(p.Forward(step=3, task=TASK, micro_batch=1))
    assert given[1].slot is given[2].slot is not given[0].slot


def test_a_task_with_two_outstanding_actions_keeps_its_slot_until_both_have_landed() -> None:
    handing, books, given = bench()
    for micro_batch in (0, 1):
        handing.give(p.Forward(step=3, task=TASK, micro_batch=micro_batch))
    books.slots.void_step()
    handing.note(p.Ready())
    assert books.slots.start_run() is not given[0].slot, "the second action writes to it"
    handing.note(p.Ready())
    assert books.slots.start_run() is given[0].slot
