"""The thread that writes checkpoints has what computing leaves of the processors, or its share if somebody waits."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastrain.job.checkpoint_plan import Checkpointed
from elastrain.runtime.durable.checkpoint_parts import NICE, WriterThread
from elastrain.runtime.training_loop import TrainingLoop
from tests.support.member_checkpoints import member_checkpoints, record_of

USUAL = 3
"""The niceness of the process, whatever that of the tests is: at 19 there would be nothing behind it."""
BEHIND = USUAL + NICE


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The niceness that was asked of the system, each time."""
    found: list[int] = []
    monkeypatch.setattr(os, "getpriority", lambda _which, _who: USUAL)
    monkeypatch.setattr(os, "setpriority", lambda _which, _who, nice: found.append(nice))
    return found


@pytest.fixture
def thread(asked: list[int]) -> Iterator[WriterThread]:
    made = WriterThread(pytest.fail)
    made.start()
    finish(made)
    yield made
    made.close(5.0)


def finish(thread: WriterThread) -> None:
    done = threading.Event()
    thread.do(done.set)
    assert done.wait(10.0)


def test_it_has_its_share_while_somebody_waits_and_once_the_job_ends(asked: list[int], thread: WriterThread) -> None:
    with thread.hurried():
        assert asked == [BEHIND, USUAL]
    assert asked == [BEHIND, USUAL, BEHIND]
    thread.close(5.0)
    assert asked == [BEHIND, USUAL, BEHIND, USUAL]
    thread.hurry()
    assert len(asked) == 4, "it has ended: its number may be another thread's"


def test_a_step_that_waits_no_longer_does_not_slow_the_end_that_waits_too(
    asked: list[int], thread: WriterThread
) -> None:
    with thread.hurried():
        with thread.hurried():
            pass
        assert asked[-1] == USUAL
    assert asked[-1] == BEHIND


def test_a_loop_that_has_ended_waits_with_the_thread_hurried(asked: list[int], thread: WriterThread) -> None:
    seen: list[list[int]] = []
    handover = SimpleNamespace(tell_landed=lambda *_: None, wait=lambda: seen.append(asked[1:]))
    loop: Any = SimpleNamespace(
        _connections=SimpleNamespace(faults=SimpleNamespace(reach=lambda _step, _phase: None)),
        _parts=SimpleNamespace(handover=handover),
        _prepared=SimpleNamespace(checkpoints=thread),
        _lines=SimpleNamespace(end=lambda: None),
    )
    TrainingLoop._wait_for_all(loop, 4)
    assert seen == [[USUAL]]
    assert asked == [BEHIND, USUAL, BEHIND], "most members may go on"


@pytest.mark.parametrize(("checkpoint", "hurries"), [(Checkpointed.TAKEN, False), (Checkpointed.LAST, True)])
def test_the_last_checkpoint_before_a_stop_is_hurried(
    checkpoint: Checkpointed, hurries: bool, asked: list[int], tmp_path: Path
) -> None:
    made = member_checkpoints(tmp_path)
    made.passed(record_of(3, checkpoint))
    finish(made._thread)
    assert (USUAL in asked) is hurries
    made.close()
