"""Text of `elastrain offload show`: memory over one pass or step, stalls, wear, and what a recording saw.

Pure: values in, text out. `plot.py` draws the same values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.profile import (
    DeviceStats,
    Lifetime,
    Path,
    Profile,
    StepProfile,
    drive_writes_per_day,
    lasts_years,
    size,
)
from elastrain.offload.planning.step_recording import HELD, Recording
from elastrain.offload.report.course import StepCourse, of_pass, of_step

BARS = " ▁▂▃▄▅▆▇█"
MOST_MODULES = 12
MOST_OPERATORS = 5


def render(profiles: Mapping[str, Profile]) -> str:
    """Return the whole report of processes that moved activations, with details of the first one."""
    name, first = next(iter(profiles.items()))
    lines = _overview(profiles) if len(profiles) > 1 else []
    return "\n".join([*lines, f"member    {name}", *_process(first)])


def _process(profile: Profile) -> list[str]:
    stats, last = profile.stats, profile.stats.last
    limit = "no limit" if stats.limit_bytes is None else f"limit {size(stats.limit_bytes)}"
    lines = [
        f"offload   {stats.passes} passes in {stats.elapsed_s:.1f} s, {limit}",
        f"amount    {profile.reason or stats.amount}",
        f"memory    {size(stats.live_bytes)} of saved activations now, {size(stats.peak_bytes)} at the peak",
        f"saved     {size(stats.saved_bytes)}, {size(stats.shared_bytes)} more through shared storages",
        f"spilled   {size(stats.spilled_bytes)}, of which {size(stats.forwarded_bytes)} forwarded from memory",
        f"stalls    {stats.save_stall_s:.3f} s in forward, {stats.need_stall_s:.3f} s in backward",
        *(f"device    {_device(each, stats.elapsed_s)}" for each in stats.devices if each.written_bytes),
        *(f"zstd      {each}" for device in stats.devices for each in device.packing),
        *(f"fault     {fault}" for fault in stats.faults),
    ]
    if profile.places:
        places = [(each.what, size(each.memory_bytes), size(each.disk_bytes)) for each in profile.places]
        lines += ["", *_table(("what", "in memory", "on disk"), *places)]
    if last is not None:
        times = f"forward {last.forward_s:.3f} s, whole {last.total_s:.3f} s, peak {size(last.peak_bytes)}"
        lines += ["", f"pass {last.number}: {times}", *_curves({"happened": of_pass(last)})]
        lines += ["", *_table(("came back", "storages", "bytes", "waited"), *_paths(last.lifetimes))]
        lines += ["", *_table(("module", "saved", "spilled"), *_modules(last.lifetimes))]
    return lines


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Transfers of all processes of a host to and from one directory."""

    name: str
    processes: int
    written_bytes: int
    read_bytes: int
    writes_per_day: float


def drives(profiles: Mapping[str, Profile]) -> tuple[Drive, ...]:
    """Return the drives with the sums of all processes that use them.

    Writes per day are projected from the longest time that a process has used the drive.
    """
    found: dict[tuple[str, str], list[tuple[str, float, DeviceStats]]] = defaultdict(list)
    for process, each in profiles.items():
        for device in each.stats.devices:
            found[each.host, device.name].append((process, each.stats.elapsed_s, device))
    hosts = {host for host, _ in found}
    return tuple(
        Drive(
            name=f"{host}:{name}" if len(hosts) > 1 else name,
            processes=len({process for process, _, _ in users}),
            written_bytes=(written_bytes := sum(device.written_bytes for _, _, device in users)),
            read_bytes=sum(device.read_bytes for _, _, device in users),
            writes_per_day=drive_writes_per_day(
                written_bytes,
                max(device.capacity_bytes for _, _, device in users),
                max(elapsed_s for _, elapsed_s, _ in users),
            ),
        )
        for (host, name), users in found.items()
    )


def _overview(profiles: Mapping[str, Profile]) -> list[str]:
    """Return two tables, with a row for each process and a row for each drive."""
    rows = [("member", "passes", "limit", "peak", "spilled", "stalls", "written", "drive writes/day")]
    for name, stats in ((name, each.stats) for name, each in profiles.items()):
        limit = "-" if stats.limit_bytes is None else size(stats.limit_bytes)
        sizes = size(stats.peak_bytes), size(stats.spilled_bytes)
        stalls = f"{stats.save_stall_s + stats.need_stall_s:.3f} s"
        written = size(sum(device.written_bytes for device in stats.devices))
        wear = sum(device.drive_writes_per_day(stats.elapsed_s) for device in stats.devices)
        rows.append((name, str(stats.passes), limit, *sizes, stalls, written, f"{wear:.2f}"))
    shared = [("drive", "processes", "written", "read", "drive writes/day")]
    for each in drives(profiles):
        moved = size(each.written_bytes), size(each.read_bytes)
        shared.append((each.name, str(each.processes), *moved, f"{each.writes_per_day:.2f}"))
    return [*_table(*rows), "", *_table(*shared), ""]


def _device(device: DeviceStats, elapsed_s: float) -> str:
    quota = "no quota" if device.quota_bytes is None else f"a quota of {size(device.quota_bytes)}"
    return (
        f"{device.name}: slab {size(device.slab_bytes)} of {quota}, written {size(device.written_bytes)}, "
        f"read {size(device.read_bytes)}, "
        f"{device.write_bytes_per_s / 1e9:.2f} / {device.read_bytes_per_s / 1e9:.2f} GB/s, "
        f"{device.drive_writes_per_day(elapsed_s):.2f} drive writes per day"
        + (f"; a device's bytes moved by {device.moved_by}" if device.moved_by else "")
    )


def _paths(lifetimes: Sequence[Lifetime]) -> Iterable[tuple[str, ...]]:
    for path in Path:
        found = [each for each in lifetimes if each.path is path]
        if found:
            moved, waited_s = sum(each.size_bytes for each in found), sum(each.waited_s for each in found)
            yield path.value, str(len(found)), size(moved), f"{waited_s:.3f} s"


def _modules(lifetimes: Sequence[Lifetime]) -> Iterable[tuple[str, ...]]:
    saved, spilled = defaultdict[str, int](int), defaultdict[str, int](int)
    for each in lifetimes:
        saved[each.module] += each.size_bytes
        spilled[each.module] += 0 if each.path is Path.KEPT else each.size_bytes
    for name in sorted(saved, key=lambda name: -saved[name])[:MOST_MODULES]:
        yield name, size(saved[name]), size(spilled[name])
    if len(saved) > MOST_MODULES:
        yield f"and {len(saved) - MOST_MODULES} more", "", ""


# A plan beside what happened.


def render_step(profile: StepProfile, rating_bytes: float | None) -> str:
    """Return the whole report of a step under a plan, planned beside measured, and its recording."""
    plan, courses = profile.plan, of_step(profile)
    seen = courses["happened"]
    allowed = f"{size(seen.peak_bytes)} of {size(profile.limit_bytes)} allowed"
    rows: list[tuple[str, ...]] = [
        ("step", f"{plan.played.step_s:.3f} s", f"{seen.step_s:.3f} s"),
        ("stalls", f"{sum(plan.played.stalls_s):.3f} s", f"{sum(seen.waited_s):.3f} s"),
        ("memory", size(plan.played.peak_bytes), allowed),
    ]
    for place, row in enumerate(seen.moved):
        rows.append((row.name, *(size(sum(each.moved[place].values)) for each in courses.values())))
    for number, tier in enumerate(profile.tiers):
        if rating_bytes is not None and not tier.is_memory:
            rows.append((f"life of {tier.name}", *(_life(each, number, rating_bytes) for each in courses.values())))
    lines = [f"plan      {plan.reason}", "", *_table(("", *courses), *rows), "", *_curves(courses)]
    return "\n".join(lines if profile.recording is None else [*lines, "", *_recorded(profile.recording)])


def _life(course: StepCourse, tier: int, rating_bytes: float) -> str:
    return f"{lasts_years(course.total_bytes(tier, reads=False), course.step_s, rating_bytes):.3g} years"


# A recording.


def held_bytes(recording: Recording) -> list[int]:
    """Return the bytes of all existing storages, for each operator."""
    end = len(recording.operators)
    change = [0] * (end + 1)
    for storage in recording.storages:
        change[storage.born or 0] += storage.size_bytes
        change[max(end if storage.died is None else storage.died, storage.born or 0)] -= storage.size_bytes
    return list(accumulate(change))[:-1]


def active_fraction(recording: Recording) -> float:
    """Return the bytes that an operator uses divided by the bytes held, as the mean over operators."""
    held = held_bytes(recording)
    uses = [each.size_bytes / held[place] for each in recording.storages for place in each.uses if held[place]]
    return sum(uses) / max(1, sum(map(bool, held)))


def bytes_of(recording: Recording, kind: Kind) -> int:
    """Return the bytes of all storages of one kind, even if they did not exist at the same time."""
    return sum(storage.size_bytes for storage in recording.storages if storage.kind is kind)


def _recorded(recording: Recording) -> list[str]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for each in recording.operators:
        seconds[each.name.removeprefix("aten.")].append(each.seconds)
    kinds = Counter(storage.kind for storage in recording.storages)
    whole_s = sum(each.seconds for each in recording.operators)
    slowest = sorted(seconds.items(), key=lambda each: -sum(each[1]))
    return [
        f"recorded  {len(recording.operators)} operators in {whole_s:.3f} s, "
        f"at most {size(max(held_bytes(recording), default=0))} held; "
        f"an operator uses {active_fraction(recording):.2%} of what is held, in the mean",
        *_table(*((kind.value, f"{kinds[kind]} storages", size(bytes_of(recording, kind))) for kind in HELD)),
        *_table(*((name, f"{len(took)} runs", f"{sum(took):.3f} s") for name, took in slowest[:MOST_OPERATORS])),
    ]


# Tables and curves.


def _table(*rows: Sequence[str]) -> list[str]:
    """Return lines with aligned columns: the first one to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]


def _curves(courses: Mapping[str, StepCourse]) -> list[str]:
    """Return the rows of all courses over time as bars: one line for each course, all to one scale."""
    lines = []
    for rows in zip(*((*each.held, *each.moved) for each in courses.values()), strict=True):
        columns = [course.columns(row) for course, row in zip(courses.values(), rows, strict=True)]
        if top := max(map(max, columns)):
            lines.append(rows[0].name if rows[0].is_sum else f"{rows[0].name}, at most {size(top)}")
            lines += [f"  {name:<9}{bars(each, top)}" for name, each in zip(courses, columns, strict=True)]
    return lines


def bars(values: Iterable[int], top: int) -> str:
    """Return one character for each value, by its height relative to `top`."""
    return "".join(BARS[-(-value * (len(BARS) - 1) // top)] for value in values)
