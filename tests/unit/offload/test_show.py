"""Reports and profile files, on values."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path as FilePath

import msgspec
import pytest
from typer.testing import CliRunner, Result

from elastrain.launcher.cli.command_line import app
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.planning.orders import Arrival, BlockSizes, SeenStep, StepStage, UpdateOrder
from elastrain.offload.planning.plan_search import Policy, choose
from elastrain.offload.planning.plan_values import Tier
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
    StepProfile,
    StorageBytes,
    as_data,
    encode,
    read,
    size,
    write,
)
from elastrain.offload.planning.step_recording import HELD, Standing
from elastrain.offload.report.course import COLUMNS, of_pass, of_step
from elastrain.offload.report.plot import draw, draw_step
from elastrain.offload.report.show import Drive, bars, drives, render, render_step

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
            moved_by="GPUDirect",
        ),
    ),
    last=LAST,
)
PROFILE = Profile(
    stats=STATS,
    places=(Occupancy(what="optimizer shards", memory_bytes=MIB, disk_bytes=5 * MIB),),
    reason="the last 3 MiB stay",
)
changed = msgspec.structs.replace


def test_every_size_is_found_in_the_statistics_themselves() -> None:
    sizes = asdict(replace(STATS.storages, live_bytes=1, forwarded_bytes=2, evicted_bytes=3))
    stats = replace(STATS, storages=StorageBytes(**sizes))
    assert {name: getattr(stats, name) for name in sizes} == sizes and len(set(sizes.values())) == len(sizes)
    told = as_data(changed(PROFILE, stats=stats))["stats"]
    assert {name: told[name] for name in sizes} == sizes and "storages" not in told


def test_the_screen_says_where_memory_and_time_went() -> None:
    text = render({"m0": PROFILE})
    for part in (
        "8 passes in 86400.0 s, limit 3 MiB",
        "amount    the last 3 MiB stay",
        "a quota of 16 MiB, written 3 TiB",
        "2.00 / 3.00 GB/s, 3.00 drive writes per day; a device's bytes moved by GPUDirect",
        "fault     the drive is full",
        "waited             1  1 MiB  0.250 s",
        "0.up (Linear)  2 MiB    2 MiB",
        "optimizer shards      1 MiB    5 MiB",
        "1.up (Linear)  1 MiB      0 B",
        "in memory, at most 3 MiB\n  happened ",
    ):
        assert part in text


def test_the_curve_shows_the_peak_where_it_is() -> None:
    course = of_pass(LAST)
    columns = course.columns(course.held[0])
    assert len(columns) == COLUMNS and columns.index(max(columns)) == COLUMNS // 2
    drawn = bars(columns, 3 * MIB)
    assert drawn[COLUMNS // 2] == "█" and "█" not in drawn[: COLUMNS // 2]
    nothing = of_pass(replace(LAST, lifetimes=(), timeline=(), total_s=0.0))
    assert bars(nothing.columns(nothing.held[0]), 1) == " " * COLUMNS


def test_sizes_are_for_people() -> None:
    assert [size(n) for n in (0, 999, 1 << 20, 3 << 30, 5 << 40)] == ["0 B", "999 B", "1 MiB", "3 GiB", "5 TiB"]


def test_who_shares_a_drive_wears_it_together() -> None:
    other = replace(STATS, elapsed_s=43_200.0, devices=(replace(STATS.devices[0], written_bytes=1 << 40),))
    here = {"m0": changed(PROFILE, host="a"), "m1": changed(PROFILE, host="a", stats=other)}
    drive = Drive(name="/ssd", processes=2, written_bytes=4 << 40, read_bytes=32 * MIB, writes_per_day=4.0)
    assert drives(here) == (drive,)
    apart = {"m0": here["m0"], "m1": changed(here["m1"], host="b")}
    assert [(each.name, each.writes_per_day) for each in drives(apart)] == [("a:/ssd", 3.0), ("b:/ssd", 2.0)]


def test_a_pass_tells_what_was_saved_and_is_not_in_memory() -> None:
    late = replace(LAST.lifetimes[1], stalled_s=0.25, released_s=0.5)
    measured = replace(LAST, lifetimes=(LAST.lifetimes[0], late), timeline=((0.0, MIB), (0.5, 0), (0.5, 3 * MIB)))
    course = of_pass(measured)
    memory, disk = (dict(zip(course.ends_s(), row.values, strict=False)) for row in course.held)
    assert memory == {0.0: MIB, 0.35: MIB, 0.5: 3 * MIB, 1.0: 3 * MIB}
    assert disk == {0.0: 0, 0.35: MIB, 0.5: 0, 1.0: 0}
    assert course.step_s == measured.total_s and max(course.held[0].values) == 3 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("last", [LAST, None])
def test_the_picture_is_written(tmp_path: FilePath, last: PassProfile | None) -> None:
    profiles = {"m0": changed(PROFILE, stats=replace(STATS, last=last)), "m1": PROFILE}
    draw(profiles, tmp_path / "pass.svg")
    assert (tmp_path / "pass.svg").stat().st_size > 1000
    draw({"m0": changed(profiles["m0"], stats=replace(STATS, devices=()))}, tmp_path / "pass.png")
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


def step_profile() -> StepProfile:
    """Two blocks within a limit at which states leave; the first point was measured in detail."""
    blocks = tuple(
        BlockSizes(name=name, parameter_bytes=MIB, gradient_bytes=MIB, state_bytes=2 * MIB, touches=(number,))
        for number, name in enumerate("ab")
    )
    stages = [(StepStage.FORWARD, 0), (StepStage.FORWARD, 1), (StepStage.BACKWARD, 1), (StepStage.BACKWARD, 0)]
    stages += [(StepStage.UPDATE, 0), (StepStage.UPDATE, 1)]
    standing = Standing(held_bytes=(2 * MIB, 0, 3 * MIB, 0, 0), waited_s=0.5, moved_bytes=((2 * MIB, 0),))
    points = [Arrival(stage=stage, block=block, seconds=1.0) for stage, block in stages]
    seen = SeenStep(blocks=blocks, points=(replace(points[0], standing=standing), *points[1:]))
    tiers = (Tier(name="/ssd", read_bytes_per_s=1e9, write_bytes_per_s=1e9),)
    policy = Policy(orders=(UpdateOrder.AFTER_BACKWARD,))
    chosen = choose(seen, 7 * MIB, tiers, policy)
    return StepProfile(limit_bytes=7 * MIB, tiers=tiers, seen=seen, order=UpdateOrder.AFTER_BACKWARD, plan=chosen.plan)


def test_a_step_is_planned_and_measured_point_by_point() -> None:
    profile = step_profile()
    planned, happened = of_step(profile).values()
    moved = sum(share.size_bytes for move in profile.plan.moves for share in move.shares)
    assert planned.total_bytes(0, reads=True) == moved > 0
    assert planned.peak_bytes <= 7 * MIB < 8 * MIB and planned.step_s == pytest.approx(profile.plan.played.step_s)
    assert [row.values[0] for row in happened.held] == [2 * MIB, 0, 3 * MIB, 0, 0] and len(happened.held) == len(HELD)
    assert (happened.step_s, happened.peak_bytes, happened.waited_s[0]) == (6.5, 5 * MIB, 0.5)
    assert happened.total_bytes(0, reads=False) == sum(happened.columns(happened.moved[0])) == 2 * MIB


def test_the_screen_says_what_was_planned_beside_what_happened() -> None:
    text = render_step(step_profile(), 1e15)
    for part in ("planned", "5 MiB of 7 MiB allowed", "\noptimizer states, at most ", "life of /ssd"):
        assert part in text
    assert "life" not in render_step(step_profile(), None)


@pytest.mark.slow
def test_the_picture_of_a_step_is_written(tmp_path: FilePath) -> None:
    draw_step(step_profile(), tmp_path / "step.svg")
    assert (tmp_path / "step.svg").stat().st_size > 1000


def test_both_kinds_of_profiles_come_back_from_their_files(tmp_path: FilePath) -> None:
    for profile in (PROFILE, step_profile()):
        write(tmp_path / "it.json", profile)
        assert read(tmp_path / "it.json") == profile
    layouts = [list(msgspec.json.decode(encode(each))) for each in (PROFILE, step_profile())]
    assert layouts == [["format", "stats", "places", "reason", "host"], ["kind", "format", "profile"]]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format":1,"stats":{},"places":[],"reason":""}',
        '{"format":2}',
        '{"stats":{"limit_by',
        '{"kind":"lifetimes","format":7,"profile":{}}',
        '{"kind":"lifetimes","format":1,"profile":{"limit_by',
        '{"kind":"activations","format":1}',
    ],
)
def test_a_file_that_is_no_profile_is_refused_in_one_sentence(tmp_path: FilePath, text: str) -> None:
    (tmp_path / "m0.json").write_text(text)
    with pytest.raises(OffloadConfigError, match=r"m0\.json holds no profile that can be read"):
        read(tmp_path / "m0.json")


@pytest.mark.parametrize("profile", [PROFILE, step_profile()])
def test_a_profile_of_another_format_is_refused(tmp_path: FilePath, profile: Profile | StepProfile) -> None:
    told = msgspec.json.decode(encode(profile))
    (tmp_path / "it.json").write_bytes(msgspec.json.encode({**told, "format": told["format"] + 1}))
    with pytest.raises(OffloadConfigError, match=r"\$\.format"):
        read(tmp_path / "it.json")


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["offload", *arguments])


def test_a_profile_without_a_step_is_refused_where_plans_are_made(tmp_path: FilePath) -> None:
    write(tmp_path / "m0.json", PROFILE)
    told = ask("plan", str(tmp_path / "m0.json"))
    assert told.exit_code == 2 and "has no step to plan for" in told.stderr and told.stderr.count("\n") == 1


def test_a_step_in_the_folder_of_a_run_is_shown_where_it_is_named(tmp_path: FilePath) -> None:
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "offload").mkdir()
    for name, profile in {"m0": PROFILE, "m1": PROFILE, "s": step_profile()}.items():
        write(tmp_path / "offload" / f"{name}.json", profile)
    assert [line.split()[0] for line in ask("show", str(tmp_path)).stdout.splitlines()[:3]] == ["member", "m0", "m1"]
    assert list(json.loads(ask("show", str(tmp_path), "--json").stdout)) == ["m0", "m1"]
    assert ask("show", str(tmp_path), "--member", "s").stdout.startswith("plan ")
    assert "there is no profile of 'm7': there are s, m0, m1" in ask("show", str(tmp_path), "--member", "m7").stderr
