"""Text of `elastrain offload show`: memory over one pass, paths by which storages came back, stalls, drives and wear.

Pure: values in, text out. `plot.py` draws the same values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastrain.offload.planning.profile import (
    DeviceStats,
    Lifetime,
    Occupancy,
    PassProfile,
    Path,
    Profile,
    drive_writes_per_day,
    size,
)

COLUMNS = 60
BARS = " ▁▂▃▄▅▆▇█"


def render(profile: Profile) -> str:
    """Return the whole report of one process."""
    stats = profile.stats
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
    return "\n".join([*lines, *_places(profile.places), *([] if stats.last is None else _last_pass(stats.last))])


def _places(places: Sequence[Occupancy]) -> list[str]:
    if not places:
        return []
    rows = [f"{each.what:<40}{size(each.memory_bytes):>12}{size(each.disk_bytes):>12}" for each in places]
    return ["", f"{'what':<40}{'in memory':>12}{'on disk':>12}", *rows]


OVERVIEW = ("member", "passes", "limit", "peak", "spilled", "stalls", "written", "drive writes/day")


def overview(name: str, profile: Profile) -> tuple[str, ...]:
    """Return one process as a table row with the columns `OVERVIEW`."""
    stats = profile.stats
    return (
        name,
        str(stats.passes),
        "-" if stats.limit_bytes is None else size(stats.limit_bytes),
        size(stats.peak_bytes),
        size(stats.spilled_bytes),
        f"{stats.save_stall_s + stats.need_stall_s:.3f} s",
        size(sum(device.written_bytes for device in stats.devices)),
        f"{sum(device.drive_writes_per_day(stats.elapsed_s) for device in stats.devices):.2f}",
    )


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


DRIVES = ("drive", "processes", "written", "read", "drive writes/day")


def drive_row(drive: Drive) -> tuple[str, ...]:
    """Return one drive as a table row with the columns `DRIVES`."""
    return (
        drive.name,
        str(drive.processes),
        size(drive.written_bytes),
        size(drive.read_bytes),
        f"{drive.writes_per_day:.2f}",
    )


def _device(device: DeviceStats, elapsed_s: float) -> str:
    return (
        f"{device.name}: slab {size(device.slab_bytes)} of {_quota(device)}, written {size(device.written_bytes)}, "
        f"read {size(device.read_bytes)}, "
        f"{device.write_bytes_per_s / 1e9:.2f} / {device.read_bytes_per_s / 1e9:.2f} GB/s, "
        f"{device.drive_writes_per_day(elapsed_s):.2f} drive writes per day"
    )


def _quota(device: DeviceStats) -> str:
    return "no quota" if device.quota_bytes is None else f"a quota of {size(device.quota_bytes)}"


def _last_pass(last: PassProfile) -> list[str]:
    return [
        "",
        f"pass {last.number}: forward {last.forward_s:.3f} s, whole {last.total_s:.3f} s, peak {size(last.peak_bytes)}",
        curve(last.timeline, last.total_s),
        "",
        f"{'came back':<12}{'storages':>9}{'bytes':>12}{'waited':>10}",
        *_ways(last.lifetimes),
        "",
        f"{'module':<40}{'saved':>12}{'spilled':>12}",
        *_modules(last.lifetimes),
    ]


def curve(timeline: Sequence[tuple[float, int]], total_s: float, columns: int = COLUMNS) -> str:
    """Draw the live bytes over the pass, one character per column. Each shows the highest value in its span of time."""
    highest = [0] * columns
    live_bytes, column = 0, 0
    for at_s, after_bytes in timeline:
        reached = min(columns - 1, int(at_s / total_s * columns)) if total_s > 0 else 0
        for passed in range(column, reached + 1):
            highest[passed] = max(highest[passed], live_bytes)
        live_bytes, column = after_bytes, reached
        highest[column] = max(highest[column], live_bytes)
    top = max(highest) or 1
    return "".join(BARS[-(-each * (len(BARS) - 1) // top)] for each in highest)


def _ways(lifetimes: Sequence[Lifetime]) -> list[str]:
    lines = []
    for path in Path:
        found = [each for each in lifetimes if each.path is path]
        if found:
            moved, waited_s = sum(each.size_bytes for each in found), sum(each.waited_s for each in found)
            lines.append(f"{path.value:<12}{len(found):>9}{size(moved):>12}{waited_s:>8.3f} s")
    return lines


def _modules(lifetimes: Sequence[Lifetime], most: int = 12) -> list[str]:
    saved: dict[str, int] = defaultdict(int)
    spilled: dict[str, int] = defaultdict(int)
    for each in lifetimes:
        saved[each.module] += each.size_bytes
        spilled[each.module] += 0 if each.path is Path.KEPT else each.size_bytes
    largest = sorted(saved, key=lambda name: -saved[name])
    lines = [f"{name:<40}{size(saved[name]):>12}{size(spilled[name]):>12}" for name in largest[:most]]
    rest = len(largest) - most
    return [*lines, f"and {rest} more"] if rest > 0 else lines
