"""Drawing a run: who computed when, who was killed, who came back, and the loss. Values in, a PNG out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.journals import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORWARD_STEPS = ("#2b6cb0", "#63a4dc")
"""Micro-batches of even and odd steps."""
LOST = "#c53030"
BACK = "#2f855a"
WARMING = "#d8dee6"


def figure(rows: int, *, heights: tuple[float, ...], size: tuple[float, float] = (9, 5)) -> tuple[Figure, list[Axes]]:
    """Panels above one another with one time axis, drawn without a screen."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = Figure(figsize=size, dpi=130, layout="constrained")
    FigureCanvasAgg(drawn)
    panels = drawn.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes in panels[:, 0]:
        axes.spines[["top", "right"]].set_visible(False)
    return drawn, list(panels[:, 0])


def members(axes: Axes, run: Run, names: Sequence[str], *, origin_s: float) -> None:
    """A row per named member: grey while its process starts, blue where it computes, a triangle where it came back."""
    for row, name in enumerate(names):
        member = run.members[name]
        joined = run.first_view_with(name)
        begin, end = run.started_s[name], run.deaths_s.get(name)
        until = joined.at_s if joined else end
        if until is not None:
            axes.barh(row, until - begin, left=begin - origin_s, height=0.3, color=WARMING)
        for parity, colour in enumerate(FORWARD_STEPS):
            works = [work for work in member.micro_batches if work.step % 2 == parity]
            bars = [(w.started_s - origin_s, w.ended_s - w.started_s) for w in works]
            axes.broken_barh(bars, (row - 0.35, 0.7), facecolors=colour, linewidth=0)
        if joined is not None and name in run.replaces:
            axes.plot(joined.at_s - origin_s, row, marker=">", color=BACK, markersize=7)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)


def kills(axes: Axes, names: Sequence[str], killed_s: Mapping[str, float], *, origin_s: float) -> None:
    """A cross in the row of each killed member."""
    for name, at_s in killed_s.items():
        axes.plot(at_s - origin_s, names.index(name), marker="X", color=LOST, markersize=9, zorder=5)


def save(drawn: Figure, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    drawn.savefig(path)
    return path
