"""Writes the table of all metrics into the page on watching, from the code.

`python -m docs.metrics` writes it; `tests/unit/launcher/test_metrics.py` fails when it is out of date.
"""

from __future__ import annotations

from pathlib import Path

from elastrain.launcher.watch.metrics.metric_table import METRICS, UP_HELP

PAGE = Path(__file__).parent / "watching.md"
BEGIN, END = "<!-- metrics: python -m docs.metrics -->", "<!-- /metrics -->"


def table() -> str:
    """Return the table, between its two marks."""
    rows = [f"| `elastrain_up` | gauge | | {UP_HELP} |"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.served_name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join([BEGIN, "", "| metric | kind | further labels | meaning |", "|---|---|---|---|", *rows, "", END])


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
