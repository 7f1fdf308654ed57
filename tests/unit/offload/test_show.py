"""What is printed for people, on values."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path as FilePath

import pytest

from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.planning.profile import (
    WRITE_EVERY_S,
    DeviceStats,
    Lifetime,
    Occupancy,
    OffloadStats,
    PassProfile,
    Path,
    Profile,
    ProfileFile,
    StorageBytes,
    as_data,
    read,
    size,
)
from elastrain.offload.report.plot import draw, saved_in_all
from elastrain.offload.report.show import COLUMNS, Drive, curve, drives, render

MIB = 1 << 20


def lifetime(index: int, path: Path, module: str) -> Lifetime:
    return Lifetime(
        index=index,
        size_bytes=MIB,
        dtype="torch.float32",
        module=module,
        saved_s=0.1 * index,
        needed_s=1.0 - 0.1 * index,
        released_s=1.0 - 0.1 * index,
        path=path,
        waited_s=0.25 if path is Path.WAITED else 0.0,
    )


LAST = PassProfile(
    number=7,
    forward_s=0.5,
    total_s=1.0,
    saved_bytes=4 * MIB,
    spilled_bytes=2 * MIB,
    peak_bytes=3 * MIB,
    save_stall_s=0.0,
    need_stall_s=0.25,
    lifetimes=(
        lifetime(0, Path.WAITED, "0.up (Linear)"),
        lifetime(1, Path.READ_AHEAD, "0.up (Linear)"),
        lifetime(2, Path.KEPT, "1.up (Linear)"),
    ),
    timeline=((0.0, MIB), (0.25, 2 * MIB), (0.5, 3 * MIB), (0.75, MIB), (1.0, 0)),
)
STATS = OffloadStats(
    limit_bytes=3 * MIB,
    passes=8,
    elapsed_s=86_400.0,
    storages=StorageBytes(
        live_bytes=0,
        peak_bytes=3 * MIB,
        saved_bytes=32 * MIB,
        shared_bytes=MIB,
        spilled_bytes=16 * MIB,
        forwarded_bytes=0,
        evicted_bytes=0,
    ),
    save_stall_s=0.0,
    need_stall_s=2.0,
    amount="the last 3 MiB stay",
    faults=("the drive is full",),
    devices=(
        DeviceStats(
            name="/ssd",
            slab_bytes=8 * MIB,
            used_bytes=0,
            quota_bytes=16 * MIB,
            written_bytes=3 << 40,
            read_bytes=16 * MIB,
            write_bytes_per_s=2e9,
            read_bytes_per_s=3e9,
            capacity_bytes=1 << 40,
        ),
    ),
    last=LAST,
)
PROFILE = Profile(
    stats=STATS,
    places=(Occupancy(what="optimizer shards", memory_bytes=MIB, disk_bytes=5 * MIB),),
    reason="the last 3 MiB stay",
)


def test_every_size_is_found_in_the_statistics_themselves() -> None:
    sizes = asdict(replace(STATS.storages, live_bytes=1, forwarded_bytes=2, evicted_bytes=3))
    stats = replace(STATS, storages=StorageBytes(**sizes))
    assert {name: getattr(stats, name) for name in sizes} == sizes and len(set(sizes.values())) == len(sizes)
    told = as_data(replace(PROFILE, stats=stats))["stats"]
    assert {name: told[name] for name in sizes} == sizes and "storages" not in told


def test_the_screen_says_where_memory_and_time_went() -> None:
    text = render(PROFILE)
    for part in (
        "8 passes in 86400.0 s, limit 3 MiB",
        "amount    the last 3 MiB stay",
        "a quota of 16 MiB, written 3 TiB",
        "2.00 / 3.00 GB/s, 3.00 drive writes per day",
        "fault     the drive is full",
        "waited              1       1 MiB   0.250 s",
        "0.up (Linear)                                  2 MiB       2 MiB",
        "optimizer shards                               1 MiB       5 MiB",
        "1.up (Linear)                                  1 MiB         0 B",
    ):
        assert part in text


def test_the_curve_shows_the_peak_where_it_is() -> None:
    drawn = curve(LAST.timeline, LAST.total_s)
    assert len(drawn) == COLUMNS
    assert drawn[COLUMNS // 2] == "█"
    assert "█" not in drawn[: COLUMNS // 2]
    assert curve((), 0.0) == " " * COLUMNS


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 999, 1 << 20, 3 << 30, 5 << 40)] == ["0 B", "999 B", "1 MiB", "3 GiB", "5 TiB"]


def test_who_shares_a_drive_wears_it_together() -> None:
    other = replace(STATS, elapsed_s=43_200.0, devices=(replace(STATS.devices[0], written_bytes=1 << 40),))
    here = {"m0": replace(PROFILE, host="a"), "m1": replace(PROFILE, host="a", stats=other)}
    drive = Drive(name="/ssd", processes=2, written_bytes=4 << 40, read_bytes=32 * MIB, writes_per_day=4.0)
    assert drives(here) == (drive,)
    apart = {"m0": here["m0"], "m1": replace(here["m1"], host="b")}
    assert [(each.name, each.writes_per_day) for each in drives(apart)] == [("a:/ssd", 3.0), ("b:/ssd", 2.0)]


def test_what_memory_would_hold_if_nothing_had_left() -> None:
    assert saved_in_all(()) == []
    late = replace(LAST.lifetimes[1], stalled_s=0.25, released_s=0.5)
    found = saved_in_all((LAST.lifetimes[0], late))
    assert found == [(0.0, MIB), (0.35, 2 * MIB), (0.5, MIB), (1.0, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("last", [LAST, None])
def test_the_picture_is_written(tmp_path: FilePath, last: PassProfile | None) -> None:
    profiles = {"m0": replace(PROFILE, stats=replace(STATS, last=last)), "m1": PROFILE}
    draw(profiles, tmp_path / "pass.svg")
    assert (tmp_path / "pass.svg").stat().st_size > 1000
    draw({"m0": replace(profiles["m0"], stats=replace(STATS, devices=()))}, tmp_path / "pass.png")
    with pytest.raises(ValueError, match="Format"):
        draw(profiles, tmp_path / "pass.unknown")


def test_a_profile_comes_back_from_its_file_as_it_was(tmp_path: FilePath) -> None:
    now_s = [0.0]
    file = ProfileFile(tmp_path / "offload" / "m0.json", lambda: now_s[0])
    file.offer(lambda: PROFILE)
    assert list(tmp_path.iterdir()) == []
    now_s[0] = WRITE_EVERY_S
    file.offer(lambda: PROFILE)
    assert read(tmp_path / "offload" / "m0.json") == PROFILE
    assert [each.name for each in (tmp_path / "offload").iterdir()] == ["m0.json"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format":1,"stats":{},"places":[],"reason":""}', '{"format":2}'])
def test_a_file_that_is_no_profile_is_refused_in_one_sentence(tmp_path: FilePath, text: str) -> None:
    (tmp_path / "m0.json").write_text(text)
    with pytest.raises(OffloadConfigError, match="holds no profile of an offload that can be read"):
        read(tmp_path / "m0.json")
