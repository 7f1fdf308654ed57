"""An error that nobody has thought of, in the thread that writes checkpoints, gives one up and stops nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastrain import protocol as p
from elastrain.base.checkpoints import CheckpointOptions
from elastrain.checkpoint import Checkpointed
from elastrain.runtime.durable.checkpoints import Bearings, Checkpoints
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.state import ShardState
from elastrain.values import Contribution, Record


class Writing:
    """A member's checkpoints, and what they tell and log."""

    def __init__(self, folder: Path) -> None:
        self.told: list[p.PartWritten] = []
        self.logged = ""
        described: Any = SimpleNamespace(buffers=dict)
        bearings = Bearings(
            options=CheckpointOptions(place=str(folder)),
            me="m0",
            job="job",
            life=1,
            resume=None,
            tell=self._hear,
            wake=lambda: None,
            say=lambda _message: None,
            has_agent=False,
            log=self._log,
        )
        self.checkpoints = Checkpoints(bearings, described)
        self.checkpoints.open()

    def _hear(self, event: p.Event) -> None:
        assert isinstance(event, p.PartWritten)
        self.told.append(event)

    def _log(self, event: str, **fields: Any) -> None:
        self.logged += f"{event} {fields}"

    def write(self, step: int) -> p.PartWritten:
        """What is told of this member's part."""
        contribution, taken = Contribution(), Checkpointed.TAKEN
        record = Record(
            step=step,
            generation=1,
            contribution=contribution,
            square_norm=0.0,
            skipped=False,
            switch=False,
            checkpoint=taken,
        )
        self.checkpoints.passed(record)
        self.checkpoints.carry_out(p.BeginPart(step=step, shards=(0,)))
        state = ShardState(shard=0, version=step, parameters=torch.ones(4), pieces=[{}])
        self.checkpoints.captured.take(step, None, state)
        done = threading.Event()
        self.checkpoints._thread.do(done.set)
        assert done.wait(10.0), "the thread has ended"
        self.checkpoints.carry_out(p.EndCheckpoint(step=step, reason="over", is_told=False, told=""))
        return self.told.pop()


@pytest.fixture
def writing(tmp_path: Path) -> Iterator[Writing]:
    made = Writing(tmp_path)
    yield made
    made.checkpoints.close()


def no_memory(*_: object) -> None:
    raise MemoryError("all is taken")


def test_one_checkpoint_is_given_up_and_the_next_is_written(writing: Writing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PartWriter, "write", no_memory)
    told = writing.write(3)
    assert (told.step, told.shards, told.problem) == (3, (), "MemoryError: all is taken")
    assert "no_memory" in writing.logged, "where it was"
    monkeypatch.undo()
    told = writing.write(4)
    assert (told.step, told.shards, told.problem) == (4, (0,), "")
