"""Picture of a plan beside the measured step, for `elastrain offload show --plot`.

Imports matplotlib only in `draw`.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from elastrain.offload.planning.step_profile import StepProfile
from elastrain.offload.planning.step_recording import HELD
from elastrain.offload.report import plan_report
from elastrain.offload.report.plan_report import StepCourse

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = ("#2f5d8a", "#4f9d69", "#f0b55a", "#b5533c", "#9aa5b1")
MIB = 1 << 20


def draw(profile: StepProfile, file: Path) -> None:
    """Draw memory by kind, transfers on each tier, and waits, over the time of a step. Planned left, measured right.

    The suffix of the file chooses the format. Raises OSError, or ValueError for an unknown format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(3, 2, sharey="row", squeeze=False)
    count = len(profile.tiers)
    courses = {
        "planned": plan_report.planned(profile.plan, count),
        "happened": plan_report.happened(profile.seen.points, count),
    }
    for column, (name, course) in enumerate(courses.items()):
        _memory(rows[0][column], name, course, profile.limit_bytes)
        _moves(rows[1][column], course, [tier.name for tier in profile.tiers])
        _stalls(rows[2][column], course)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file)


def _ends_s(course: StepCourse) -> list[float]:
    """Return the time at which the step begins, and the time at which each point ends."""
    lasts = (seconds + waited_s for seconds, waited_s in zip(course.seconds, course.waited_s, strict=True))
    return [0.0, *accumulate(lasts)]


def _memory(axes: Axes, name: str, course: StepCourse, limit_bytes: int) -> None:
    rows = [[value / MIB for value in (*row, row[-1])] for row in course.held_bytes]
    axes.stackplot(_ends_s(course), rows, labels=[kind.value for kind in HELD], colors=COLORS, step="post")
    axes.axhline(limit_bytes / MIB, color="black", linestyle="--", linewidth=1, label="limit")
    axes.set(ylabel="MiB", xlim=(0, course.step_s))
    axes.set_title(f"{name}: a step of {course.step_s:.3g} s", loc="left")
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=3)


def _moves(axes: Axes, course: StepCourse, names: list[str]) -> None:
    for tier, name in enumerate(names):
        for place, (word, sign) in enumerate((("written to", 1), ("read from", -1))):
            heights = [sign * value / MIB for value in course.moved_bytes[tier][place]]
            axes.plot(_ends_s(course)[:-1], heights, drawstyle="steps-post", linewidth=1, label=f"{word} {name}")
    axes.set(ylabel="MiB at each point", xlim=(0, course.step_s))
    axes.legend(frameon=False, fontsize="small", loc="upper left")


def _stalls(axes: Axes, course: StepCourse) -> None:
    axes.plot(_ends_s(course)[:-1], course.waited_s, drawstyle="steps-post", color=COLORS[3])
    axes.set(ylabel="seconds waited", xlabel="seconds since the step began", xlim=(0, course.step_s))
