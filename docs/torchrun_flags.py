"""Writes the table of torchrun's flags that `elastrain run` refuses into the page on torchrun, from the code.

`python -m docs.torchrun_flags` writes it; `tests/unit/launcher/test_cli.py` fails when it is out of date.
"""

from __future__ import annotations

from pathlib import Path

from elastrain.launcher.cli.options.torchrun import ADVICE, BACKEND

PAGE = Path(__file__).parent / "tutorials" / "from-torchrun.md"
BEGIN, END = "<!-- refused flags: python -m docs.torchrun_flags -->", "<!-- /refused flags -->"


def table() -> str:
    """Return the table, between its two marks."""
    rows = [f"| `--{name}` | {advice} |" for name, advice in sorted(ADVICE.items())]
    rows.append(f"| `--rdzv-backend` other than `{BACKEND}` | leave it out, and name an etcd in `--rdzv-endpoint` |")
    return "\n".join([BEGIN, "", "| torchrun's flag | what to do instead |", "|---|---|", *rows, "", END])


def page() -> str:
    """Return the page with the table of today."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page())
