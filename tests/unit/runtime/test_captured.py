"""Captured states within their room: copies wait for it, what has none is written as it lies, nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastrain import protocol as p
from elastrain.runtime.durable import checkpoint_parts as module
from elastrain.runtime.durable.checkpoint_parts import Captured, WriterThread
from elastrain.snapshot.durable.places.local import LocalPlace, SystemFiles
from tests.support.checkpoints import state
from tests.support.waiting import until

STEP = 5
SIZE_BYTES = state(0, STEP).nbytes


class Disk(SystemFiles):
    """Takes nothing until it is `ready`."""

    def __init__(self) -> None:
        self.ready = threading.Event()

    def write(self, fd: int, data: memoryview) -> int:
        self.ready.wait(10.0)
        return super().write(fd, data)


class Job:
    """One checkpoint of so many shards; what a member says of it."""

    def __init__(self, folder: Path, shards: int) -> None:
        self.told: list[p.Event] = []
        self.disk = Disk()
        self.thread = WriterThread(pytest.fail)
        self.thread.start()
        self.woken = 0
        self.captured = Captured(self.thread, self.told.append, self._wake, lambda task: task())
        place = LocalPlace(folder, self.disk)
        command = p.BeginPart(step=STEP, shards=tuple(range(shards)))
        self.captured.begin(command, place, f"life-0001-step-{STEP:010d}", "m0")
        self.folder = folder

    def _wake(self) -> None:
        self.woken += 1

    @property
    def files(self) -> list[str]:
        return [path.name for path in self.folder.rglob("*") if path.is_file()]

    def has_told(self) -> p.PartWritten:
        until(lambda: self.told, 10.0)
        (told,) = self.told
        assert isinstance(told, p.PartWritten)
        return told


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = Job(tmp_path, 2)
    yield job
    job.disk.ready.set()
    job.thread.close(10.0)


def test_no_more_waits_for_the_disk_than_there_is_room_for(job: Job) -> None:
    job.captured.room.limit_bytes = SIZE_BYTES
    assert job.captured.make_room(SIZE_BYTES, is_awaited=True)
    job.captured.take(STEP, None, state(0, STEP))
    assert not job.captured.is_ready_for(SIZE_BYTES)
    threading.Timer(0.1, job.disk.ready.set).start()
    assert job.captured.make_room(SIZE_BYTES, is_awaited=True)
    assert job.captured.room.used_bytes == 0
    job.captured.take(STEP, None, state(1, STEP))
    assert (job.has_told().shards, job.has_told().problem) == ((0, 1), "")
    assert job.captured.room.take_most_bytes() == SIZE_BYTES
    until(lambda: job.woken == 2, 10.0)  # the engine, which waits for nothing else
    assert job.captured.blocked.take() > 0.05


def test_a_copy_behind_the_scenes_blocks_no_step_and_one_that_a_step_waits_for_does(job: Job) -> None:
    for shard, is_awaited in enumerate((False, True)):
        assert job.captured.make_room(SIZE_BYTES, is_awaited=is_awaited)
        time.sleep(0.02)  # it is copied
        job.captured.take(STEP, None, state(shard, STEP))
        assert (job.captured.blocked.take() >= 0.02) is is_awaited


def test_a_state_without_room_for_a_copy_is_written_before_it_may_change(job: Job) -> None:
    job.captured.room.limit_bytes = SIZE_BYTES - 1
    job.disk.ready.set()
    for shard in (0, 1):
        assert job.captured.is_ready_for(SIZE_BYTES)
        assert not job.captured.make_room(SIZE_BYTES, is_awaited=True)
        lent = state(shard, STEP)
        digest = lent.digest()
        job.captured.lend(STEP, None, lent)
        lent.parameters.zero_()
        assert job.captured.room.used_bytes == 0
        assert lent.digest() != digest
    assert job.has_told().problem == ""
    assert [str(state(shard, STEP).digest()) in told for shard, told in enumerate(job.has_told().told)] == [True, True]


def test_a_state_that_changes_while_it_is_written_is_in_no_checkpoint(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.captured._patience_s = 0.1
    job.captured.room.limit_bytes = 0
    lent = state(0, STEP)
    job.captured.lend(STEP, None, lent)
    lent.parameters.zero_()
    job.disk.ready.set()
    job.captured.lend(STEP, None, state(1, STEP))  # there is nothing more to be written
    assert job.has_told().problem == "the disk is too slow for the memory there is"
    job.thread.close(10.0)
    assert len(job.told) == 1 and job.files == []


@pytest.mark.parametrize("way", ["take", "lend"])
def test_a_state_that_has_changed_since_it_was_verified_is_in_no_checkpoint(job: Job, way: str) -> None:
    job.disk.ready.set()
    right, wrong = state(0, STEP), state(1, STEP)
    digests = [right.checksum(), wrong.checksum()]
    wrong.parameters.view(torch.int32)[3] ^= 1
    for each, digest in zip((right, wrong), digests, strict=True):
        getattr(job.captured, way)(STEP, digest, each)
    assert job.has_told().problem == "the state of shard 1 has changed in memory since it was verified"
    job.thread.close(10.0)
    assert job.files == []


def test_the_patience_of_all_states_together_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_S", 0.3)
    job = Job(tmp_path, 40)
    job.captured.room.limit_bytes = SIZE_BYTES
    began_s = time.monotonic()
    for shard in range(40):
        job.captured.make_room(SIZE_BYTES, is_awaited=True)
        job.captured.take(STEP, None, state(shard, STEP))
    assert 0.25 < time.monotonic() - began_s < 0.3 * 40 / 2
    assert job.has_told().problem == "the disk is too slow for the memory there is"
    job.disk.ready.set()
    until(lambda: job.captured.room.used_bytes == 0, 10.0)
    job.thread.close(10.0)
    assert job.files == []
