"""What the launcher says to its user."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """One line on standard error, in one write: what workers print at the same time does not come between."""
    sys.stderr.write(f"elastrain: {text}\n")
    sys.stderr.flush()
