"""What the groups of a process did last, as its agent reads it."""

from __future__ import annotations

import stat
from pathlib import Path

from elastrain.comm.shm import group_trails
from elastrain.comm.shm.group_trails import GroupTrail, GroupTrails


def test_the_last_call_of_each_group_is_read_while_it_is_under_way_and_after_the_end_of_its_process(
    tmp_path: Path,
) -> None:
    file = tmp_path / "m0.groups"
    trails = GroupTrails(file)
    world, pair, _never_used = trails.of("world"), trails.of("1"), trails.of("2")
    world.begin("barrier")
    world.end(well=True)
    pair.begin("all_reduce of 3 float32")
    pair.end(well=False)
    pair.called("recv of rank0, tag 7")
    world.begin("broadcast of 5 float32")
    assert group_trails.read(file) == [
        "the last call (2) of its group 'world' was broadcast of 5 float32: under way",
        "the last call (2) of its group '1' was recv of rank0, tag 7: called",
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    pair.wait("the wait for all")
    assert "the last call (2) of its group '1' was the wait for all: under way" in group_trails.read(file)
    trails.remove()
    world.end(well=True)
    assert group_trails.read(file) == []


def test_what_is_too_long_is_cut_and_what_is_too_many_is_left_out(tmp_path: Path) -> None:
    trails = GroupTrails(tmp_path / "m0.groups")
    for number in range(70):
        trails.of(f"{number} of many").begin("x" * 500)
    told = group_trails.read(tmp_path / "m0.groups")
    assert len(told) == 64
    assert "x" * 160 in told[0] and "x" * 161 not in told[0]


def test_other_bytes_are_read_as_they_are_and_without_a_file_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "m0.groups").write_bytes(b"\xff" * 300)
    assert [line.endswith("?") for line in group_trails.read(tmp_path / "m0.groups")] == [True]
    silent = GroupTrail("world")
    silent.begin("barrier")
    silent.end(well=True)
