"""Pictures for `elastrain offload show --plot`: passes with places of data, stalls and wear, or a plan beside a step.

Imports matplotlib only to draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from elastrain.offload.planning.profile import Profile, StepProfile, size
from elastrain.offload.report import show
from elastrain.offload.report.course import StepCourse, of_pass, of_step

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = MEMORY, DISK, FORWARD, BACKWARD, RATED = "#2f5d8a", "#f0b55a", "#4f9d69", "#b5533c", "#9aa5b1"
RATED_WRITES_PER_DAY = (0.3, 3.0)
MIB = 1 << 20


@contextmanager
def _picture(file: FilePath) -> Iterator[Figure]:
    """Write the figure to the file, whose suffix is the format. Raises OSError, or ValueError for an unknown format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    yield figure
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        if labels := axes.get_legend_handles_labels()[1]:
            axes.legend(frameon=False, loc="upper right", fontsize="small", ncols=1 + len(labels) // 3)
    figure.savefig(file)


def draw(profiles: Mapping[str, Profile], file: FilePath) -> None:
    """Draw the first process's last pass and places of data, and the stalls and drives of all processes."""
    with _picture(file) as figure:
        grid = figure.add_gridspec(2, 3, height_ratios=(1.25, 1))
        name, first = next(iter(profiles.items()))
        _pass(figure.add_subplot(grid[0, :]), name, first)
        _places(figure.add_subplot(grid[1, 0]), name, first)
        _stalls(figure.add_subplot(grid[1, 1]), profiles)
        _wear(figure.add_subplot(grid[1, 2]), show.drives(profiles))


def draw_step(profile: StepProfile, file: FilePath) -> None:
    """Draw memory by kind, transfers on each tier, and waits, over the time of a step. Planned left, measured right."""
    with _picture(file) as figure:
        rows = figure.subplots(3, 2, sharey="row", squeeze=False)
        for column, (name, course) in enumerate(of_step(profile).items()):
            memory, moves, waits = rows[:, column]
            _held(memory, course, profile.limit_bytes)
            memory.set_title(f"{name}: a step of {course.step_s:.3g} s", loc="left")
            for place, row in enumerate(course.moved):
                _line(moves, course, [(-1) ** place * value / MIB for value in row.values], row.name)
            moves.set_ylabel("MiB at each point")
            _line(waits, course, course.waited_s, None)
            waits.set(ylabel="seconds waited", xlabel="seconds since the step began")


def _held(axes: Axes, course: StepCourse, limit_bytes: int | None) -> None:
    rows = [[value / MIB for value in (*row.values, row.values[-1])] for row in course.held]
    axes.stackplot(course.ends_s(), rows, labels=[row.name for row in course.held], colors=COLORS, step="post")
    if limit_bytes is not None:
        axes.axhline(limit_bytes / MIB, color="black", linestyle="--", linewidth=1, label="limit")
    axes.set(ylabel="MiB", xlim=(0, course.step_s))
    axes.margins(y=0.3)


def _line(axes: Axes, course: StepCourse, values: Sequence[float], label: str | None) -> None:
    axes.plot(course.ends_s()[:-1], values, drawstyle="steps-post", linewidth=1, label=label)
    axes.set_xlim(0, course.step_s)


def _pass(axes: Axes, name: str, profile: Profile) -> None:
    last, limit_bytes = profile.stats.last, profile.stats.limit_bytes
    if last is None:
        axes.set_title(f"{name} has not finished a pass")
        return
    is_near = limit_bytes is not None and limit_bytes < 2 * last.saved_bytes
    _held(axes, of_pass(last), limit_bytes if is_near else None)
    turn_s = last.forward_s + last.save_stall_s
    axes.axvline(turn_s, color="black", linestyle=":", linewidth=1)
    top = 1.02 * max(last.saved_bytes, last.peak_bytes) / MIB
    axes.text(turn_s, top, "forward  ", ha="right", va="bottom", fontsize="small")
    axes.text(turn_s, top, "  backward", ha="left", va="bottom", fontsize="small")
    axes.set(ylim=(0, 1.1 * top), xlabel="seconds since the pass began")
    stalls = f"stalls {last.save_stall_s:.3f} s forward, {last.need_stall_s:.3f} s backward"
    sizes = f"{size(last.saved_bytes)} saved, {size(last.peak_bytes)} in memory at the peak"
    axes.set_title(f"{name}, pass {last.number}: {sizes}; {stalls}", loc="left")


def _places(axes: Axes, name: str, profile: Profile) -> None:
    places = profile.places[::-1]
    names = [each.what for each in places]
    memory, disk = [each.memory_bytes / MIB for each in places], [each.disk_bytes / MIB for each in places]
    axes.barh(names, memory, color=MEMORY, label="in memory")
    axes.barh(names, disk, left=memory, color=DISK, label="on disk")
    axes.set_xlabel("MiB")
    axes.set_title(f"what is where now, {name}", loc="left")


def _stalls(axes: Axes, profiles: Mapping[str, Profile]) -> None:
    stats = [each.stats for each in profiles.values()]
    forward = [100 * each.save_stall_s / each.elapsed_s if each.elapsed_s else 0.0 for each in stats]
    backward = [100 * each.need_stall_s / each.elapsed_s if each.elapsed_s else 0.0 for each in stats]
    axes.bar(list(profiles), forward, color=FORWARD, label="forward, for room")
    axes.bar(list(profiles), backward, bottom=forward, color=BACKWARD, label="backward, for a read")
    axes.set_ylabel("% of the time")
    axes.set_title("stalls", loc="left")
    axes.set_ylim(0, max(1.0, 1.35 * max(a + b for a, b in zip(forward, backward, strict=True))))


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
