"""Draws a step of a job of pipelines: who went forward and backward when, and who was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elastrain.pipeline.planner.timeline import PlayedStep
from experiments.pipeline.figures import Action
from experiments.timeline import LOST, figure, save

COLOURS = {"forward": "#2b6cb0", "backward": "#2f855a", "weight": "#b7791f"}


def apart(done: Sequence[Action]) -> list[Action]:
    """Forwards end where their backwards begin: a member with the loss computes the one inside of the other's span."""
    begun_s = {(each.member, each.run, each.micro_batch): each.span[0] for each in done if each.kind == "backward"}
    found = []
    for each in done:
        start_s, end_s = each.span
        its_s = begun_s.get((each.member, each.run, each.micro_batch), end_s)
        is_inside = each.kind == "forward" and start_s < its_s < end_s
        found.append(replace(each, span=(start_s, its_s)) if is_inside else each)
    return found


def draw_beside(path: Path, done: Sequence[Action], predicted: PlayedStep) -> Path:
    """A measured step above the predicted one, in seconds since the last record. Returns `path`."""
    expected = [
        (each.action.task.member, str(each.action.kind), each.begin_s, each.end_s) for each in predicted.actions
    ]
    measured = [(each.member, each.kind, *each.span) for each in apart(done)]
    names = sorted({member for member, *_ in measured})
    drawn, both = figure(2, heights=(1, 1), size=(10, 5))
    for axes, bars, title in zip(both, (measured, expected), ("measured", "predicted"), strict=True):
        for member, kind, start_s, end_s in bars:
            where = {"left": start_s, "color": COLOURS[kind], "edgecolor": "white", "height": 0.7}
            axes.barh(names.index(member), end_s - start_s, **where)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_title(title)
        axes.set_xlim(0, max(end_s for *_, end_s in [*measured, *expected]))
    both[-1].set_xlabel("seconds of the step")
    return save(drawn, path)


def draw_step(path: Path, done: Sequence[Action], *, lost: str, step: int, killed_s: float) -> Path:
    """A row per member; each bar is one micro-batch through its blocks, with its number. Returns `path`."""
    found = [each for each in done if each.step == step]
    origin_s = min(each.span[0] for each in found)
    names = sorted({each.member for each in found})
    drawn, (axes,) = figure(1, heights=(1,), size=(10, 3))
    for each in apart(found):
        row, (start_s, end_s) = names.index(each.member), each.span
        axes.barh(
            row, end_s - start_s, left=start_s - origin_s, color=COLOURS[each.kind], edgecolor="white", height=0.7
        )
        axes.annotate(str(each.micro_batch), ((start_s + end_s) / 2 - origin_s, row), ha="center", va="center", size=6)
    axes.plot(killed_s - origin_s, names.index(lost), marker="X", color=LOST, markersize=9, zorder=5)
    for kind, colour in COLOURS.items():
        axes.barh(0, 0, color=colour, label=kind)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the step")
    axes.set_title(f"2 + 2 members, 16 runs: {lost} is lost in the middle of a step")
    axes.legend(frameon=False, ncols=2, loc="upper right", bbox_to_anchor=(1, 1.2))
    return save(drawn, path)
