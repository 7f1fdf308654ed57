"""The report page: one HTML file without a script, which loads nothing from elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from html import escape

from elastrain.launcher.watch.report.drawing import Axis, curve, curves, marks, phase_bar, stems, timeline
from elastrain.launcher.watch.report.history import History, Points, TimelineMark
from elastrain.launcher.watch.report.incidents import PHASES, Incident
from elastrain.launcher.watch.report.page_style import style
from elastrain.launcher.watch.words import DASH, duration, plural, size

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content policy: a browser that opens the page refuses scripts, and anything that is not in the file."""
_HATCH = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs><pattern id="hatch" width="5" '
    'height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0v5" stroke="var(--warming)" '
    'stroke-width="3"/></pattern></defs></svg>'
)
_CURVES = ("curve", "c1", "c2", "c3", "c4")
_NAMED_MOST = 12
_LONG_TIMELINE = 40


def page(history: History) -> str:
    """Return the page as text."""
    axis = Axis(length_s=history.length_s)
    title = f"elastrain: job {history.job or 'without a name'}"
    body = "".join(
        (
            f"<h1>{escape(title)}</h1>",
            _summary(history),
            _timeline(history, axis),
            _section("Checkpoints, injected faults and findings", marks(_rows(history), axis, duration), _MARKS_NOTE),
            *_curves(history, axis),
            _incidents(history.incidents),
            _texts(history),
        )
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style()}</style></head><body>{_HATCH}{body}</body></html>\n"
    )


def _summary(history: History) -> str:
    began = history.began_wall
    when = DASH if began is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began))
    facts = {
        "began": when,
        "length": duration(history.length_s),
        "steps committed": f"{history.steps:,}",
        "members": str(len(history.lives)),
        "lost": str(sum(life.is_lost for life in history.lives)),
        "incidents": str(len(history.incidents)),
        "end": history.end,
    }
    listed = "".join(f"<div><dt>{name}</dt><dd>{escape(text)}</dd></div>" for name, text in facts.items())
    cut = plural(history.unreadable, "line")
    note = f'<p class="bad">{cut} of the logs could not be read, and are left out.</p>' if history.unreadable else ""
    return f"<dl>{listed}</dl>{note}"


def _section(title: str, chart: str, note: str = "", kind: str = "chart") -> str:
    told = f'<p class="quiet">{note}</p>' if note else ""
    return f'<section><h2>{escape(title)}</h2>{told}<div class="{kind}">{chart}</div></section>'


_MARKS_NOTE = "A triangle marks what went well or was asked for, a cross what did not. Rest the pointer on a mark."


def _timeline(history: History, axis: Axis) -> str:
    note = "Hatched: the worker starts. Solid: it is a member. A cross: it was lost. Seconds count from the start."
    kind = "chart long" if len(history.lives) > _LONG_TIMELINE else "chart"
    return _section("Members", timeline(history.lives, axis, duration), note, kind)


def _rows(history: History) -> list[tuple[str, Sequence[TimelineMark]]]:
    return [("saved", history.checkpoints), ("injected", history.faults), ("findings", history.findings)]


def _curves(history: History, axis: Axis) -> list[str]:
    series = history.series
    memory: dict[str, Points] = dict(series.memory)
    names = [_CURVES[number % len(_CURVES)] for number in range(len(memory))]
    if series.limit_bytes is not None and memory:
        limit = float(series.limit_bytes)
        memory["limit"], names = [(0.0, limit), (history.length_s, limit)], [*names, "limit"]
    told = ", ".join(series.memory) if len(series.memory) <= _NAMED_MOST else plural(len(series.memory), "member")
    return [
        _section("Seconds per step", curve(series.step_s, axis, duration, duration, "seconds per step")),
        _section("Loss", curve(series.loss, axis, lambda value: f"{value:.3g}", duration, "loss")),
        _section("Memory", curves(memory, axis, size, duration, "memory of each member", names), escape(told)),
        _section("Audited micro-batches per step", stems(series.audits, axis, duration, "audits")),
    ]


def _incidents(incidents: Sequence[Incident]) -> str:
    if not incidents:
        return _section("Incidents", '<p class="none">the members never changed</p>')
    longest = max(incident.total_ms for incident in incidents)
    key = '<svg class="key" viewBox="0 0 1 1" aria-hidden="true"><rect class="phase{}" width="1" height="1"/></svg> {}'
    keys = " ".join(key.format(number, name) for number, name in enumerate(PHASES))
    head = "".join(f'<th class="number">{name}</th>' for name in PHASES)
    rows = "".join(_incident_row(incident, longest) for incident in incidents)
    table = (
        f'<table><thead><tr><th class="number">view</th><th class="number">at</th><th>what</th>{head}'
        f'<th class="number">all</th><th>phases</th></tr></thead><tbody>{rows}</tbody></table>'
    )
    return _section("Incidents", table, f"Milliseconds of each phase. {keys}", "table")


def _incident_row(incident: Incident, longest_ms: float) -> str:
    what = [f"{', '.join(incident.lost)} lost"] if incident.lost else []
    what += [f"{', '.join(incident.joined)} joined"] if incident.joined else []
    told = "; ".join(what) or incident.reason
    why = "" if incident.reason in ("", told) else f'<br><span class="quiet">{escape(incident.reason)}</span>'
    phases = "".join(f'<td class="number">{_ms(took)}</td>' for took in incident.took_ms)
    return (
        f'<tr><td class="number">{incident.generation}</td><td class="number">{duration(incident.begins_s)}</td>'
        f'<td class="what">{escape(told)}{why}</td>{phases}<td class="number">{_ms(incident.total_ms)}</td>'
        f"<td>{phase_bar(incident.took_ms, longest_ms)}</td></tr>"
    )


def _ms(took: float | None) -> str:
    return DASH if took is None else f"{took:,.1f}" if took < 1000 else f"{took:,.0f}"


def _texts(history: History) -> str:
    """Return the marks as a table, for readers who print the page or use no pointer."""
    found = sorted([*history.checkpoints, *history.faults, *history.findings], key=lambda mark: mark.at_s)
    if not found:
        return ""
    rows = "".join(
        f'<tr><td class="number">{duration(mark.at_s)}</td><td>{escape(mark.text)}</td></tr>' for mark in found[-500:]
    )
    table = f'<table><thead><tr><th class="number">at</th><th>what</th></tr></thead><tbody>{rows}</tbody></table>'
    return _section("Checkpoints, faults and findings in words", table, kind="table")
