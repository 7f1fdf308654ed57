"""Whatever sequence of saves, prunings and power cuts: once a checkpoint was complete, there is one to return to.

python -m pytest -m on_demand tests/property/snapshot/test_checkpoints.py       10,000 sequences, 150 in the usual run
"""

from __future__ import annotations

import errno
import random
import sys
from dataclasses import replace
from typing import Any

import pytest

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.runtime.durable.disk import CheckpointDisk, kept_text, told_by_keepers
from elastrain.snapshot.durable import retention
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import LOOP, VERIFIED, name_of, place_in_time
from elastrain.snapshot.durable.owner import claim
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.publishing import mark_verified, visible
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import Kept, choose, kept, prune, remove, thorough
from elastrain.snapshot.durable.writing import PartWriter
from tests.support.checkpoints import manifest, save, state
from tests.support.crashing_files import CrashingFiles, PowerCutError

CALLS_MOST = 60
"""System calls of a save of this size, with some more."""


class _Story:
    """One job over several lives, on one file system."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = CrashingFiles(seed)
        self.place = LocalPlace("/disk/checkpoints", self.files)
        self.life, self.step = 0, 0
        self.complete: tuple[int, int] | None = None
        """The newest one whose `publish` has returned."""
        self.damaged: set[str] = set()
        self.told: list[str] = []

    def turn(self) -> None:
        """Something happens; the power may go in the middle of it, or a system call may fail."""
        act = self.chance.choice([self.save] * 3 + [self.verify, self.begin_anew] + [self.prune, self.damage] * 2)
        if act != self.damage and self.chance.random() < 0.5:
            self.files.calls_left = self.chance.randrange(CALLS_MOST)
        elif act not in (self.damage, self.begin_anew) and self.chance.random() < 0.3:
            self.files.faults = {self.files.calls + self.chance.randrange(CALLS_MOST): errno.ENOSPC}
        try:
            act()
            self.told.append(act.__name__)
        except PowerCutError:
            self.told.append(f"{act.__name__}, cut")
            self.files.crash()
            self.place = LocalPlace(self.place.location, self.files)
            self.resume()
        except CheckpointError as error:
            self.told.append(f"{act.__name__}: {error}")
        finally:
            self.files.calls_left, self.files.faults = None, {}

    def save(self) -> None:
        self.step += self.chance.randint(1, 5)
        save(self.place, self.step, life=self.life)
        self.complete = (self.life, self.step)

    def verify(self) -> None:
        names = visible(self.place)
        if names and not Checkpoint.open([self.place], names[-1]).verify():
            mark_verified(self.place, names[-1])

    def prune(self) -> None:
        for removal in prune(kept(self.place), keep=self.chance.randint(1, 3), now_s=0.0):
            remove(self.place, removal.name)

    def damage(self) -> None:
        """A bit flips in the newest one that nobody has read back: the good one before it has to be there still."""
        good = [name for name in visible(self.place) if name not in self.damaged]
        if len(good) < 2 or VERIFIED in self.place.names(good[-1]):
            return
        file = self.chance.choice(self.place.names(good[-1]))
        self.files.damage(f"{self.place.location}/{good[-1]}/{file}")
        self.damaged.add(good[-1])
        self.complete = place_in_time(good[-2])

    def begin_anew(self) -> None:
        self.resume()

    def resume(self) -> None:
        self.check()
        claim(self.place, f"job-{self.life}", take_over=True).release()
        choice = choose([self.place], thorough)
        self.life += 1
        self.step = choice.checkpoint.manifest.step if choice.checkpoint else 0

    def check(self) -> None:
        choice = choose([self.place], thorough)
        if choice.checkpoint is None:
            assert self.complete is None, (self.told, choice.reasons)
            return
        manifest = choice.checkpoint.manifest
        assert self.complete is None or (manifest.life, manifest.step) >= self.complete, (self.told, choice.reasons)
        for shard in choice.checkpoint.read_shards(range(2)):
            assert shard.digest() == state(shard.shard, manifest.step).digest()


def _tell(seed: int) -> _Story:
    story = _Story(seed)
    for _ in range(story.chance.randint(3, 12)):
        story.turn()
        story.check()
    return story


def _tell_all() -> list[_Story]:
    return [_tell(seed) for seed in range(150)]


@pytest.mark.slow
def test_there_is_always_a_checkpoint_to_return_to() -> None:
    stories = _tell_all()
    cuts = sum(told.endswith("cut") for story in stories for told in story.told)
    faults = sum("no room" in told for story in stories for told in story.told)
    assert cuts > 200
    assert faults > 20
    assert sum(story.complete is not None for story in stories) > 80
    assert sum(len(story.damaged) for story in stories) > 10


def _sync_nothing(self: object, *_: object) -> None:
    """In the place of syncing a file, or a folder."""


def _believed(place: LocalPlace) -> list[Kept]:
    """What is there counts as read back."""
    return [replace(each, is_verified=each.is_visible) for each in retention.kept(place)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (CrashingFiles, "sync", _sync_nothing),
        (CrashingFiles, "sync_folder", _sync_nothing),
        (sys.modules[__name__], "kept", _believed),
    ],
    ids=["no sync of data", "no sync of folders", "pruned unread"],
)
def test_a_planted_bug_is_found(where: Any, name: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name before its data is synced is none: of what a cut leaves then, checksums tell, and nobody counted on it."""
    monkeypatch.setattr(where, name, bug)
    with pytest.raises((AssertionError, CheckpointError)):
        _tell_all()


class _Disks:
    """The same on the local disks of three nodes, each shard on two of them; one disk at a time may be gone for good.

    The power may be cut on one node, or a system call may fail there, in the middle of whatever it does.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.files = [CrashingFiles(3 * seed + node) for node in range(3)]
        self.step = 0
        self.complete = 0
        """The newest that all keepers have put down: from then on any one disk may be gone."""
        self.told: list[str] = []
        self.problems: list[str] = []
        self.begin()

    def note(self, _event: str, reason: str) -> None:
        if "is removed" not in reason:
            self.problems.append(reason)

    def begin(self) -> None:
        """All keepers are started anew."""
        options = CheckpointOptions(place="/disk", layout="local", keep=self.chance.randint(1, 2), resumes=True)
        self.disks = [CheckpointDisk(options, "job", self.note) for _ in self.files]
        for disk, files in zip(self.disks, self.files, strict=True):
            disk.place = LocalPlace("/disk", files)
            disk.open()

    def turn(self) -> None:
        struck = self.chance.randrange(3)
        if self.chance.random() < 0.4:
            self.files[struck].calls_left = self.chance.randrange(2 * CALLS_MOST)
        elif self.chance.random() < 0.3:
            files = self.files[struck]
            files.faults = {files.calls + self.chance.randrange(2 * CALLS_MOST): errno.ENOSPC}
        try:
            self.save()
            self.told.append("save")
        except PowerCutError:
            self.told.append("cut")
        except CheckpointError as error:
            self.told.append(str(error))
        was_cut = self.told[-1] == "cut"
        for files in self.files:
            files.calls_left, files.faults = None, {}
            if was_cut:
                files.crash()
        if was_cut:  # everything was lost
            self.begin()

    def save(self) -> None:
        self.step += 1
        name, count = name_of(0, self.step), len(self.disks)
        writers = [PartWriter(disk.place, name, writer=f"m{node}") for node, disk in enumerate(self.disks)]
        written = [[writers[n].write(state(s, self.step)) for n in (s, (s + 1) % count)] for s in range(count)]
        for writer in writers:
            writer.finish()
        loops = [d.told(name, d.attach(name, f"m{n}", ("loop", ()), {})) for n, d in enumerate(self.disks)]
        copies, verified = told_by_keepers(loops)
        text = kept_text(manifest(self.step, written, copies[LOOP]), verified)
        for node in self.chance.sample(range(count), count):
            self.disks[node].keep(0, self.step, text)
        if not self.problems:
            self.complete = self.step
        self.problems.clear()

    def newest(self, nodes: set[int]) -> int:
        """Of the checkpoints that these disks have together."""
        choice = choose([self.disks[node].place for node in sorted(nodes)], thorough)
        return choice.checkpoint.manifest.step if choice.checkpoint is not None else 0

    def check(self) -> None:
        """Whichever disk is gone."""
        for gone in range(3):
            assert self.newest({0, 1, 2} - {gone}) >= self.complete, (gone, self.told)


def _tell_of_disks(seed: int) -> _Disks:
    story = _Disks(seed)
    for _ in range(story.chance.randint(3, 8)):
        story.turn()
        story.check()
    return story


@pytest.mark.slow
def test_on_local_disks_there_is_always_one_to_return_to_whichever_disk_is_gone() -> None:
    stories = [_tell_of_disks(seed) for seed in range(14)]
    assert sum(told == "cut" for story in stories for told in story.told) > 8
    assert sum(story.complete > 1 for story in stories) > 5


@pytest.mark.on_demand
@pytest.mark.timeout(3600)
def test_on_local_disks_there_is_always_one_to_return_to_at_length() -> None:
    for seed in range(1000, 3000):
        _tell_of_disks(seed)


@pytest.mark.on_demand
@pytest.mark.timeout(3600)
def test_there_is_always_a_checkpoint_to_return_to_at_length() -> None:
    for seed in range(1000, 11_000):
        _tell(seed)


@pytest.mark.slow
def test_a_save_is_cut_at_each_of_its_system_calls() -> None:
    """Each cut leaves the checkpoint before, or the new one whole; nothing between."""
    calls = 0
    for cut in range(200):
        files = CrashingFiles(seed=cut)
        place = LocalPlace("/disk", files)
        save(place, 10)
        files.calls_left = cut
        try:
            save(place, 20)
        except PowerCutError:
            calls += 1
        else:
            break
        files.crash()
        choice = choose([place], thorough)
        assert choice.checkpoint is not None
        assert choice.checkpoint.manifest.step in (10, 20)
        save(place, 30)
        mark_verified(place, name_of(0, 30))
        for removal in prune(kept(place), keep=1, now_s=0.0):
            remove(place, removal.name)
        assert [name for name in place.names() if place_in_time(name)] == [name_of(0, 30)]
        assert all(not name.startswith(".") for name in place.names(name_of(0, 30)))
    assert calls > 20


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "there is no room: free some, or keep fewer checkpoints"),
        (errno.EACCES, "there is no permission: change the rights, or name another directory"),
        (errno.EIO, "the device reports an error: look at that drive"),
    ],
)
def test_a_save_fails_at_each_of_its_system_calls_with_a_sentence(number: int, sentence: str) -> None:
    told: set[str] = set()
    for call in range(1, 200):
        files = CrashingFiles(seed=call)
        place = LocalPlace("/disk", files)
        save(place, 10)
        files.faults = {files.calls + call: number}
        try:
            save(place, 20)
        except CheckpointError as error:
            told.add(str(error).partition(" failed: ")[2])
        else:
            if files.calls < max(files.faults):
                assert told == {sentence}
                return
        choice = choose([place], thorough)
        assert choice.checkpoint is not None
    raise AssertionError("a save has less than 200 calls")
