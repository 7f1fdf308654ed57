"""An error that nobody has thought of, in the thread that writes checkpoints, gives one up and stops nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastrain import protocol as p
from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.protocol import agent_messages as am
from elastrain.runtime.durable import disk
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.shard_state import ShardState
from tests.support.member_checkpoints import member_checkpoints, record_of

KEPT = '{"manifest":"","verified":""}'


class Writing:
    """A member's checkpoints, and what they tell and log."""

    def __init__(self, options: CheckpointOptions) -> None:
        self.told: list[p.PartWritten] = []
        self.logged = ""
        self.said: list[am.FromWorker] = []
        self.checkpoints = member_checkpoints(options, tell=self._hear, say=self.said.append, log=self._log)

    def _hear(self, event: p.Event) -> None:
        assert isinstance(event, p.PartWritten)
        self.told.append(event)

    def _log(self, event: str, **fields: Any) -> None:
        self.logged += f"{event} {fields}"

    def write(self, step: int) -> p.PartWritten:
        """What is told of this member's part."""
        self.checkpoints.passed(record_of(step))
        self.checkpoints.carry_out(p.BeginPart(step=step, shards=(0,)))
        state = ShardState(shard=0, version=step, parameters=torch.ones(4), pieces=[{}])
        self.checkpoints.captured.take(step, None, state)
        self.finish()
        self.checkpoints.carry_out(p.EndCheckpoint(step=step, reason="over", is_told=False, told=""))
        return self.told.pop()

    def finish(self) -> None:
        """What the thread has been given so far is done."""
        done = threading.Event()
        self.checkpoints._thread.do(done.set)
        assert done.wait(10.0), "the thread has ended"


@pytest.fixture
def writing(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Writing]:
    """Its parameter: the layout."""
    made = Writing(CheckpointOptions(place=str(tmp_path), layout=getattr(request, "param", "shared")))
    yield made
    made.checkpoints.close()


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError("all is taken")


def test_one_checkpoint_is_given_up_and_the_next_is_written(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartWriter, "write", no_memory)
    told = writing.write(3)
    assert (told.step, told.shards, told.problem) == (3, (), "MemoryError: all is taken")
    assert "no_memory" in writing.logged, "where it was"
    monkeypatch.undo()
    told = writing.write(4)
    assert (told.step, told.shards, told.problem) == (4, (0,), "")


def no_store(*_: object) -> None:
    raise CheckpointError("the store does not answer")


@pytest.mark.parametrize(
    ("fails", "logged"), [(no_memory, "checkpoint_failed"), (no_store, "checkpoint_tidied"), (None, "")]
)
def test_a_part_of_a_given_up_checkpoint_that_cannot_be_removed_leaves_the_open_one_alone(
    writing: Writing, monkeypatch: pytest.MonkeyPatch, fails: Any, logged: str
) -> None:
    if fails is not None:
        monkeypatch.setattr(PartWriter, "give_up", fails)
    held = threading.Event()
    writing.checkpoints.passed(record_of(3))
    writing.checkpoints.carry_out(p.BeginPart(step=3, shards=(0,)))
    writing.checkpoints._thread.do(lambda: held.wait(10.0))
    writing.checkpoints.carry_out(p.EndCheckpoint(step=3, reason="m1 was lost", is_told=False, told=""))
    writing.checkpoints.passed(record_of(4))
    held.set()
    writing.finish()
    assert writing.told == []
    assert logged in writing.logged and ("checkpoint_failed" in writing.logged) == (fails is no_memory)


def test_a_part_that_can_neither_be_written_nor_removed_tells_why_it_was_not_written(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(PartWriter, "write", no_room)
    monkeypatch.setattr(PartWriter, "give_up", no_store)
    assert writing.write(3).problem == "the disk is full"


@pytest.mark.parametrize("writing", ["shared", "local"], indirect=True)
def test_a_failure_that_tidies_an_older_one_leaves_the_open_one_alone(
    writing: Writing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "tidy", no_memory)
    monkeypatch.setattr(disk, "visible", no_memory)
    of_step_3 = p.EndCheckpoint(step=3, reason="", is_told=False, told=KEPT)
    if not writing.checkpoints.plan.all_holders:
        of_step_3 = p.EndCheckpoint(step=3, reason="it is too late", is_told=True, told="")
    writing.checkpoints._disk._wrote = name_of(1, 3)  # on local disks, it is the keeper
    held = threading.Event()

    def hold() -> None:
        assert held.wait(10.0)

    writing.checkpoints._thread.do(hold)
    writing.checkpoints.carry_out(of_step_3)
    writing.checkpoints.passed(record_of(4))
    held.set()
    writing.finish()
    assert writing.told == []
    assert "no_memory" in writing.logged, "where it was"
    assert am.Note(fields={"noticed": "while tidying up checkpoints: MemoryError: all is taken"}) in writing.said
    assert writing.write(4).problem == ""
