"""What a plan has a member hold: when memory that others have let go of is given back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastrain.memory.pipeline_memory import Load, TaskBytes
from elastrain.runtime.memory import planned_work
from elastrain.runtime.memory.planned_work import PlannedWork


def test_in_the_first_step_of_other_tasks_memory_is_given_back_until_the_step_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trimmed: list[None] = []
    sizes: Any = iter((1, 1, 2))
    monkeypatch.setattr(planned_work, "model_bytes", lambda *_: object())
    monkeypatch.setattr(planned_work, "task_bytes", lambda *_: TaskBytes(boundaries_bytes=next(sizes)))
    executor: Any = SimpleNamespace(model=None)
    work = PlannedWork("m0", executor, lambda: trimmed.append(None))
    work.trace(SimpleNamespace(), ())  # type: ignore[arg-type]

    def trims(what: Any) -> int:
        before = len(trimmed)
        what()
        return len(trimmed) - before

    shape: Any = None
    loads = [Load(tasks=(), shape=shape, in_flight=n) for n in range(3)]
    left = work.leftovers
    assert trims(left.give_back) == 0
    assert trims(lambda: work.take(loads[0])) == 1
    assert trims(left.give_back) == trims(left.give_back) == trims(left.end) == 1
    assert trims(left.give_back) == trims(lambda: work.take(loads[1])) == trims(left.end) == 0
    assert trims(lambda: work.take(loads[2])) == trims(left.give_back) == 1
