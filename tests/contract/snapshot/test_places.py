"""The contract of `places.port`, for every place there is."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.snapshot.durable.errors import CheckpointError, DamagedError, TakenError
from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.owner import claim
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.places.port import CheckpointPlace, place_at
from elastrain.snapshot.durable.publishing import mark_verified, put, stage, visible
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import choose, kept, prune, remove, thorough
from tests.support.checkpoints import manifest, save, state
from tests.support.crashing_files import CrashingFiles


@pytest.fixture(params=["folder", "simulated", "file", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointPlace]:
    if request.param == "folder":
        yield LocalPlace(tmp_path / "a" / "checkpoints")
    elif request.param == "simulated":
        yield LocalPlace("/checkpoints", CrashingFiles())
    else:
        pytest.importorskip("fsspec")
        url = f"file://{tmp_path}/b/checkpoints" if request.param == "file" else f"memory://{secrets.token_hex(4)}/c"
        yield place_at(url)


def test_nothing_is_there_at_first(place: CheckpointPlace) -> None:
    assert place.names() == place.names("folder") == []
    place.remove("folder/file")
    with pytest.raises(CheckpointError, match="does not exist"):
        place.open("folder/file")


def test_a_file_is_seen_once_it_is_committed(place: CheckpointPlace) -> None:
    sink = place.create("folder/file")
    sink.write(memoryview(b"one "))
    sink.write(memoryview(b"two"))
    sink.sync()
    assert sink.size_bytes == 7
    assert "file" not in place.names("folder")
    sink.commit()
    sink.discard()
    assert place.names("folder") == ["file"]
    assert place.names() == ["folder"]
    source = place.open("folder/file")
    assert source.size_bytes == 7
    view = memoryview(bytearray(3))
    source.read_into(view, 4)
    assert bytes(view) == b"two"
    with pytest.raises(DamagedError, match="cut short"):
        source.read_into(view, 5)
    source.close()


def test_what_is_discarded_leaves_nothing(place: CheckpointPlace) -> None:
    sink = place.create("folder/file")
    sink.write(memoryview(b"one"))
    sink.discard()
    sink.discard()
    assert place.names("folder") == []


def test_nothing_is_overwritten(place: CheckpointPlace) -> None:
    put(place, "file", b"first")
    with pytest.raises(TakenError):
        put(place, "file", b"second")
    assert place.names() == ["file"]
    source = place.open("file")
    assert source.size_bytes == 5


def test_of_two_that_begin_together_the_first_to_commit_has_the_name(place: CheckpointPlace) -> None:
    one, other = place.create("folder/file"), place.create("folder/file")
    one.write(memoryview(b"one"))
    other.write(memoryview(b"other"))
    other.commit()
    with pytest.raises(TakenError):
        one.commit()
    one.discard()
    assert place.names("folder") == ["file"]
    assert place.open("folder/file").size_bytes == 5


def test_files_and_empty_folders_are_removed(place: CheckpointPlace) -> None:
    put(place, "folder/file", b"x")
    place.remove("folder/file")
    place.remove("folder")
    assert "folder" not in place.names()


def test_a_checkpoint_is_written_chosen_and_pruned(place: CheckpointPlace) -> None:
    for step in (10, 20, 30):
        save(place, step)
    mark_verified(place, name_of(0, 30))
    mark_verified(place, name_of(0, 30))
    gone = prune(kept(place), keep=2, now_s=0.0)
    assert [removal.name for removal in gone] == [name_of(0, 10)]
    remove(place, gone[0].name)
    assert visible(place) == [name_of(0, 20), name_of(0, 30)]
    choice = choose([place], thorough)
    assert choice.checkpoint is not None
    assert [s.digest() for s in choice.checkpoint.read_shards(range(2))] == [state(i, 30).digest() for i in range(2)]


def test_a_staged_manifest_is_not_seen(place: CheckpointPlace) -> None:
    staged = stage(place, manifest(10, ()))
    assert visible(place) == []
    staged.publish()
    staged.give_up()
    assert visible(place) == [name_of(0, 10)]
    given_up = stage(place, manifest(20, ()))
    given_up.give_up()
    assert visible(place) == [name_of(0, 10)]
    assert Checkpoint.open([place], name_of(0, 10)).manifest.step == 10


def test_a_place_is_one_jobs(place: CheckpointPlace) -> None:
    mine = claim(place, "a")
    mine.check()
    save(place, 10)
    with pytest.raises(TakenError, match="checkpoints of job a, and this is job b"):
        claim(place, "b")
    mine.release()
    claim(place, "b", take_over=True).check()
    with pytest.raises(TakenError, match="writes no more"):
        mine.check()


def test_only_its_user_may_read_what_lies_on_a_disk(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        save(LocalPlace(str(tmp_path / "checkpoints")), 3)
    finally:
        os.umask(before)
    there = sorted((tmp_path / "checkpoints").rglob("*"))
    assert [path for path in there if path.is_file()]
    for path in there:
        allowed = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) & ~allowed == 0, path
