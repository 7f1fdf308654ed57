"""Charts as inline SVG. Colours are CSS variables of the page, so that a chart follows the page's theme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10

from elastrain.launcher.watch.report.history import MemberLife, Points, TimelineMark, thinned

WIDTH, LEFT, RIGHT = 1000, 70, 10
"""Pixels of a chart, of the labels at its left, and of the free stripe at its right."""
_HEIGHT = 150
_POINTS_MOST = 1500
_LABELS = 6
Words = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The common time axis of all charts."""

    length_s: float

    def x(self, at_s: float) -> float:
        """Return the horizontal place of a moment."""
        share = min(1.0, max(0.0, at_s / self.length_s)) if self.length_s > 0 else 0.0
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self, height: float, words: Words) -> str:
        """Return the axis below a chart of this height."""
        parts = []
        for at_s in moments_of(self.length_s):
            x = self.x(at_s)
            parts.append(f'<line class="grid" x1="{x}" y1="0" x2="{x}" y2="{height}"/>')
            anchor = "start" if at_s == 0 else "end" if x > WIDTH - 40 else "middle"
            parts.append(
                f'<text x="{x}" y="{height + 14}" text-anchor="{anchor}">{escape(words(at_s) if at_s else "0")}</text>'
            )
        return "".join(parts)


_MOMENTS_S = (60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def moments_of(length_s: float) -> list[float]:
    """Return round moments of a run: whole minutes, hours or days once it is long enough."""
    step_s = next((each for each in _MOMENTS_S if each * _LABELS >= length_s), 86400 * ceil(length_s / 86400 / _LABELS))
    if length_s <= _MOMENTS_S[0] * 2:
        return steps_of(0.0, length_s)
    return [float(number * step_s) for number in range(int(length_s // step_s) + 1)]


def steps_of(least: float, most: float) -> list[float]:
    """Return round numbers between two values, at most `_LABELS` or so."""
    if most <= least:
        return [least]
    rough = (most - least) / _LABELS
    power = 10 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [number * step for number in range(ceil(least / step), floor(most / step) + 1)]


def svg(height: float, body: str, label: str) -> str:
    """Return a chart with a title that screen readers read."""
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label, quote=True)}">'
        f"<title>{escape(label)}</title>{body}</svg>"
    )


def _titled(shape: str, title: str) -> str:
    """Return a shape with a text that browsers show when the pointer rests on it."""
    return shape.replace("/>", f"><title>{escape(title)}</title></{shape[1 : shape.index(' ')]}>", 1)


def timeline(lives: Sequence[MemberLife], axis: Axis, words: Words) -> str:
    """Return the Gantt chart: a row for each member, hatched while it starts, with a cross where it was lost."""
    row = 18 if len(lives) <= 60 else 11
    parts = [axis.ticks(row * len(lives), words)]
    for number, life in enumerate(lives):
        top, middle = number * row, number * row + row / 2
        end_s = axis.length_s if life.ended_s is None else life.ended_s
        entered_s = end_s if life.entered_s is None else min(life.entered_s, end_s)
        parts.append(f'<text x="{LEFT - 6}" y="{middle + 4:g}" text-anchor="end">{escape(life.member)}</text>')
        for name, begin_s, until_s in (("warming", life.started_s, entered_s), ("member", entered_s, end_s)):
            x, width = axis.x(begin_s), axis.x(until_s) - axis.x(begin_s)
            if width > 0:
                bar = f'<rect class="{name}" x="{x}" y="{top + 2}" width="{width:.1f}" height="{row - 4}"/>'
                parts.append(_titled(bar, f"{life.member} {name}: {words(begin_s)} to {words(until_s)}"))
        if life.is_lost:
            parts.append(cross(axis.x(end_s), middle, f"{life.member} lost at {words(end_s)}"))
    return svg(row * len(lives) + 20, "".join(parts), f"timeline of {len(lives)} members")


def cross(x: float, y: float, title: str) -> str:
    """Return a cross with a title."""
    return _titled(f'<path class="lost" d="M{x - 4} {y - 4}l8 8m0 -8l-8 8"/>', title)


def curve(points: Points, axis: Axis, words: Words, time_words: Words, label: str, name: str = "curve") -> str:
    """Return a chart of one curve. `words` writes its values."""
    return curves({"": points}, axis, words, time_words, label, [name])


def curves(
    several: dict[str, Points], axis: Axis, words: Words, time_words: Words, label: str, names: Sequence[str]
) -> str:
    """Return a chart of several curves with one scale; each gets the CSS classes `names` in turn."""
    values = [value for points in several.values() for _, value in points]
    if not values:
        return '<p class="none">nothing of this was written</p>'
    least, most = min(0.0, *values), max(values)
    most = most if most > least else least + 1.0

    def y(value: float) -> float:
        return round(_HEIGHT - (value - least) / (most - least) * (_HEIGHT - 8), 1)

    parts = [axis.ticks(_HEIGHT, time_words)]
    for value in steps_of(least, most):
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{y(value)}" x2="{WIDTH - RIGHT}" y2="{y(value)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:g}" text-anchor="end">{escape(words(value))}</text>')
    for number, (title, points) in enumerate(several.items()):
        kept = thinned(points, max(60, _POINTS_MOST // len(several)))
        path = " ".join(f"{axis.x(at_s)},{y(value)}" for at_s, value in kept)
        line = f'<polyline class="{names[number % len(names)]}" points="{path}"/>'
        parts.append(_titled(line, title) if title else line)
    return svg(_HEIGHT + 20, "".join(parts), label)


def stems(points: Points, axis: Axis, words: Words, label: str) -> str:
    """Return a chart of counts: a vertical line for each moment that has one."""
    if not points:
        return '<p class="none">nothing of this was written</p>'
    most = max(value for _, value in points)
    kept = thinned(points, _POINTS_MOST)
    lines = "".join(
        f'<line class="stem" x1="{axis.x(at_s)}" x2="{axis.x(at_s)}" y1="60" y2="{60 - 55 * value / most:.1f}"/>'
        for at_s, value in kept
    )
    top = f'<text x="{LEFT - 6}" y="14" text-anchor="end">{most:g}</text>'
    return svg(80, axis.ticks(60, words) + top + lines, label)


def marks(rows: Iterable[tuple[str, Sequence[TimelineMark]]], axis: Axis, words: Words) -> str:
    """Return a chart with a row of marks for each kind: a triangle for what went well, a cross for what did not."""
    parts, height = [], 0
    for name, found in rows:
        middle = height + 11
        parts.append(f'<text x="{LEFT - 6}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>')
        for mark in found:
            x, title = axis.x(mark.at_s), f"{words(mark.at_s)}: {mark.text}"
            good = f'<path class="mark" d="M{x - 4} {middle + 4}l8 0l-4 -8z"/>'
            parts.append(cross(x, middle, title) if mark.is_bad else _titled(good, title))
        height += 22
    return svg(height + 20, axis.ticks(height, words) + "".join(parts), "checkpoints, faults and findings")


def phase_bar(took_ms: Sequence[float | None], longest_ms: float) -> str:
    """Return a bar with one part for each phase, scaled by the longest incident."""
    x, parts = 0.0, []
    for number, took in enumerate(took_ms):
        width = 120 * (took or 0.0) / longest_ms if longest_ms > 0 else 0.0
        if width > 0:
            parts.append(f'<rect class="phase{number}" x="{x:.1f}" y="1" width="{max(width, 0.5):.1f}" height="10"/>')
        x += width
    return f'<svg class="bar" viewBox="0 0 120 12" aria-hidden="true">{"".join(parts)}</svg>'
