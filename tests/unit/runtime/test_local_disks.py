"""What keepers do on the disks of their nodes: a manifest on each, and nothing goes before all have a newer one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.runtime.durable.disk import CheckpointDisk, kept_text, newest_of_all, told_by_keepers
from elastrain.snapshot.durable.manifest import LOOP, Manifest, name_of
from elastrain.snapshot.durable.places.local import LocalPlace
from elastrain.snapshot.durable.publishing import publish, visible
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.durable.retention import choose, thorough
from elastrain.snapshot.durable.writing import PartWriter
from tests.support.checkpoints import manifest, state


class Nodes:
    """Three nodes with a disk each; shard `i` is held on node `i` and the next one."""

    def __init__(self, folder: Path, keep: int = 1) -> None:
        self.folders = [folder / f"n{number}" for number in range(3)]
        self.logged: list[str] = []
        places = [CheckpointOptions(place=str(folder), layout="local", keep=keep) for folder in self.folders]
        self.disks = [CheckpointDisk(options, "job", self.log) for options in places]
        for disk in self.disks:
            disk.open()

    def log(self, _event: str, reason: str) -> None:
        self.logged.append(reason)

    def write(self, step: int) -> tuple[Manifest, list[str]]:
        """Parts of all; the manifest as the member that collects makes it, and what keepers told."""
        name = name_of(1, step)
        writers = [PartWriter(disk.place, name, writer=f"m{number}") for number, disk in enumerate(self.disks)]
        written = [[writers[each].write(state(s, step)) for each in (s, (s + 1) % 3)] for s in range(3)]
        for writer in writers:
            writer.finish()
        loops = [d.told(name, d.attach(name, f"m{number}", ("loop", ()), {})) for number, d in enumerate(self.disks)]
        copies, _ = told_by_keepers(loops)
        return manifest(step, written, copies[LOOP], life=1), loops

    def keep(self, step: int, made: Manifest, loops: Sequence[str]) -> None:
        for disk in self.disks:
            disk.keep(1, step, kept_text(made, told_by_keepers(loops)[1]))

    def save(self, step: int) -> None:
        self.keep(step, *self.write(step))

    def steps(self) -> list[list[int]]:
        """Visible on each disk."""
        return [[int(name.rpartition("-")[2]) for name in visible(disk.place)] for disk in self.disks]

    def damage(self, node: int, step: int) -> None:
        file = next((self.folders[node] / name_of(1, step)).glob("part-m?-????????"))
        content = bytearray(file.read_bytes())
        content[50] ^= 1
        file.write_bytes(content)


def test_an_older_one_goes_when_every_node_has_read_back_a_newer_one(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.save(1)
    nodes.save(2)
    assert nodes.steps() == [[1, 2]] * 3  # that all have verified step 2 is known with the next one
    nodes.save(3)
    assert nodes.steps() == [[2, 3]] * 3


def test_nothing_goes_from_any_disk_for_one_that_is_damaged_on_some_disk(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    nodes.save(1)
    made, loops = nodes.write(2)
    nodes.damage(1, 2)
    nodes.keep(2, made, loops)
    nodes.save(3)
    assert nodes.steps() == [[1, 2, 3]] * 3
    assert any("is damaged, and nothing is removed for it" in reason for reason in nodes.logged)
    nodes.save(4)  # all have verified step 3
    assert nodes.steps() == [[3, 4]] * 3


def test_whichever_disk_is_gone_and_whenever_there_is_one_to_go_back_to(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for step in range(1, 5):
        made, loops = nodes.write(step)
        for kept in range(4):  # the job is lost when so many keepers have put the manifest down
            if kept:
                nodes.disks[kept - 1].keep(1, step, kept_text(made, told_by_keepers(loops)[1]))
            for gone in range(3):
                left = [LocalPlace(folder) for number, folder in enumerate(nodes.folders) if number != gone]
                found = choose(left, thorough).checkpoint
                others = kept - (gone < kept)
                assert (found.manifest.step if found else 0) == (step if others else step - 1)


def test_who_is_no_keeper_puts_nothing_down(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    made, loops = nodes.write(1)
    other = CheckpointDisk(CheckpointOptions(place=str(tmp_path / "n0"), layout="local"), "job", nodes.log)
    other.keep(1, 1, kept_text(made, told_by_keepers(loops)[1]))
    assert nodes.steps() == [[], [], []]


def test_two_members_that_made_it_visible_one_after_the_other_made_one_checkpoint(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    made, _ = nodes.write(1)
    one, later = (
        msgspec.structs.replace(
            made, time_s=time_s, shards=tuple(msgspec.structs.replace(s, parts=s.parts[kept]) for s in made.shards)
        )
        for time_s, kept in ((1.0, slice(0, 1)), (2.0, slice(1, 2)))
    )
    publish(nodes.disks[0].place, one)
    publish(nodes.disks[1].place, later)
    found = Checkpoint.open([LocalPlace(folder) for folder in nodes.folders[:2]], made.name)
    assert [each.digest() for each in found.read_shards(range(3))] == [state(s, 1).digest() for s in range(3)]


@pytest.mark.parametrize(
    ("verified", "newest"),
    [([], ""), ([["life-0001-step-0000000002"]], "life-0001-step-0000000002"), ([["a"], []], ""),
     ([[name_of(1, 2), name_of(1, 9)], [name_of(1, 9), name_of(1, 2)]], name_of(1, 9)),
     ([[name_of(1, 2), name_of(1, 9)], [name_of(1, 2)]], name_of(1, 2))],
)  # fmt: skip
def test_what_all_have_verified(verified: Any, newest: str) -> None:
    assert newest_of_all(verified) == newest
