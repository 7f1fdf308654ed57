"""Plots that several experiments share. Drawn without a screen; matplotlib is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def bars(
    path: Path, figures: Mapping[str, Sequence[float]], *, label: str, title: str, logarithmic: bool = False
) -> Path:
    """One bar per case at the median, with a whisker from the smallest to the largest figure. Returns `path`.

    `logarithmic`: for figures of different orders of magnitude; the medians are then written on the bars.
    """
    axes = _axes(title)
    for position, (name, values) in enumerate(figures.items()):
        middle = sorted(values)[len(values) // 2]
        axes.bar(position, middle, width=0.6, label=name)
        if logarithmic:
            axes.annotate(f"{middle:.2g} {label}", (position, max(values)), ha="center", va="bottom")
        axes.vlines(position, min(values), max(values), colors="black", linewidth=1)
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xticks(range(len(figures)), list(figures))
    axes.set_ylabel(label)
    return _save(axes, path)


def lines(
    path: Path, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, labels: tuple[str, str], title: str
) -> Path:
    """One line per name over (x values, y values); `labels` name the axes. Returns `path`."""
    axes = _axes(title)
    for name, (x, y) in series.items():
        axes.plot(x, y, label=name, linewidth=1.2)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.legend(frameon=False)
    return _save(axes, path)


def _axes(title: str) -> Axes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    return axes


def _save(axes: Axes, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.get_figure(root=True).savefig(path)  # type: ignore[union-attr]
    return path
