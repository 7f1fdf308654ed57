"""Picture of measurements, for `elastrain offload show --plot`: one pass, places of data, stalls, wear.

Imports matplotlib only in `draw`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from elastrain.offload.planning.profile import Lifetime, PassProfile, Profile, size
from elastrain.offload.report import show

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEMORY, DISK, RATED = "#2f5d8a", "#f0b55a", "#9aa5b1"
FORWARD, BACKWARD = "#4f9d69", "#b5533c"
RATED_WRITES_PER_DAY = (0.3, 3.0)
MIB = 1 << 20


def draw(profiles: Mapping[str, Profile], file: FilePath) -> None:
    """Draw the first process's last pass and places of data, and the stalls and drives of all processes.

    The suffix of the file chooses the format. Raises OSError, or ValueError for an unknown format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 3, height_ratios=(1.25, 1))
    name, first = next(iter(profiles.items()))
    _pass(figure.add_subplot(grid[0, :]), name, first)
    _places(figure.add_subplot(grid[1, 0]), name, first)
    _stalls(figure.add_subplot(grid[1, 1]), profiles)
    _wear(figure.add_subplot(grid[1, 2]), show.drives(profiles))
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def saved_in_all(lifetimes: Sequence[Lifetime]) -> list[tuple[float, int]]:
    """Return (seconds, bytes) at each change of the bytes that memory would hold if nothing had been spilled."""
    changes = sorted(
        [(each.saved_s + each.stalled_s, each.size_bytes) for each in lifetimes]
        + [(each.released_s, -each.size_bytes) for each in lifetimes]
    )
    steps, held_bytes = [], 0
    for at_s, more_bytes in changes:
        held_bytes += more_bytes
        steps.append((at_s, held_bytes))
    return steps


def _pass(axes: Axes, name: str, profile: Profile) -> None:
    last = profile.stats.last
    if last is None:
        axes.set_title(f"{name} has not finished a pass")
        return
    _area(axes, saved_in_all(last.lifetimes), DISK, "saved: on disk, or on its way")
    _area(axes, last.timeline, MEMORY, "saved: in memory")
    if profile.stats.limit_bytes is not None and profile.stats.limit_bytes < 2 * last.saved_bytes:
        axes.axhline(profile.stats.limit_bytes / MIB, color="black", linestyle="--", linewidth=1, label="limit")
    turn_s = last.forward_s + last.save_stall_s
    axes.axvline(turn_s, color="black", linestyle=":", linewidth=1)
    top = 1.02 * max(last.saved_bytes, last.peak_bytes) / MIB
    axes.text(turn_s, top, "forward  ", ha="right", va="bottom", fontsize="small")
    axes.text(turn_s, top, "  backward", ha="left", va="bottom", fontsize="small")
    axes.set(xlim=(0, last.total_s), ylim=(0, 1.1 * top), xlabel="seconds since the pass began", ylabel="MiB")
    axes.set_title(_title(name, last), loc="left")
    axes.legend(frameon=False, loc="upper left", fontsize="small")


def _title(name: str, last: PassProfile) -> str:
    return (
        f"{name}, pass {last.number}: {size(last.saved_bytes)} saved, {size(last.peak_bytes)} in memory at "
        f"the peak; stalls {last.save_stall_s:.3f} s forward, {last.need_stall_s:.3f} s backward"
    )


def _area(axes: Axes, timeline: Sequence[tuple[float, int]], color: str, label: str) -> None:
    at_s, held = [0.0, *(at_s for at_s, _ in timeline)], [0.0, *(held_bytes / MIB for _, held_bytes in timeline)]
    axes.fill_between(at_s, held, step="post", color=color, linewidth=0, label=label)


def _places(axes: Axes, name: str, profile: Profile) -> None:
    places = profile.places[::-1]
    names = [each.what for each in places]
    memory, disk = [each.memory_bytes / MIB for each in places], [each.disk_bytes / MIB for each in places]
    axes.barh(names, memory, color=MEMORY, label="in memory")
    axes.barh(names, disk, left=memory, color=DISK, label="on disk")
    axes.set_xlabel("MiB")
    axes.set_title(f"what is where now, {name}", loc="left")
    axes.legend(frameon=False, fontsize="small")


def _stalls(axes: Axes, profiles: Mapping[str, Profile]) -> None:
    names = list(profiles)
    stats = [each.stats for each in profiles.values()]
    forward = [100 * each.save_stall_s / each.elapsed_s if each.elapsed_s else 0.0 for each in stats]
    backward = [100 * each.need_stall_s / each.elapsed_s if each.elapsed_s else 0.0 for each in stats]
    axes.bar(names, forward, color=FORWARD, label="forward, for room")
    axes.bar(names, backward, bottom=forward, color=BACKWARD, label="backward, for a read")
    axes.set_ylabel("% of the time")
    axes.set_title("stalls", loc="left")
    axes.set_ylim(0, max(1.0, 1.35 * max(a + b for a, b in zip(forward, backward, strict=True))))
    axes.legend(frameon=False, fontsize="small", loc="upper right")


def _wear(axes: Axes, drives: Sequence[show.Drive]) -> None:
    low, high = RATED_WRITES_PER_DAY
    axes.axhspan(low, high, color=RATED, alpha=0.3, linewidth=0, label=f"usual ratings, {low:g} to {high:g}")
    axes.bar([each.name for each in drives], [each.writes_per_day for each in drives], color=MEMORY, width=0.5)
    for place, each in enumerate(drives):
        written = f"{each.writes_per_day:.2f}\n{size(each.written_bytes)} written"
        axes.annotate(written, (place, each.writes_per_day), ha="center", va="bottom", fontsize="small")
    axes.set_xlim(-0.8, max(0.8, len(drives) - 0.2))
    axes.set_ylim(0, 1.3 * max(high, *(each.writes_per_day for each in drives), 0.0))
    axes.tick_params(axis="x", labelsize="small")
    axes.set_ylabel("drive writes per day")
    axes.set_title("wear at this pace", loc="left")
    axes.legend(frameon=False, fontsize="small", loc="upper right")
