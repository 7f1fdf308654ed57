"""A table on standard output: drawn on a terminal, aligned words elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print it; every row has a cell per column."""
    if not sys.stdout.isatty():
        widths = [max(len(row[place]) for row in (columns, *rows)) for place in range(len(columns))]
        for row in (columns, *rows):
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
