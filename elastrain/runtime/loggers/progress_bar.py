"""A progress bar of committed steps, where standard error is a terminal."""

from __future__ import annotations

import sys
import time

_WIDTH = 30
_EVERY_S = 0.1


class StepBar:
    """One line of a terminal that counts committed steps. It does nothing where standard error is no terminal."""

    def __init__(self) -> None:
        self.until = 0
        """Number of steps of the job."""
        self._shown_s = 0.0
        self._began: tuple[float, int] | None = None
        """Time and step at which this member began to count."""

    def show(self, steps: int) -> None:
        """Show that so many steps are committed."""
        now_s = time.monotonic()
        self._began = began_s, began = self._began or (now_s, steps)
        if (now_s - self._shown_s < _EVERY_S and steps < self.until) or not sys.stderr.isatty():
            return
        self._shown_s = now_s
        done = min(1.0, steps / self.until) if self.until else 1.0
        pace = f", {(steps - began) / (now_s - began_s):.2f} steps/s" if now_s > began_s else ""
        bar = "━" * round(_WIDTH * done)
        # The cursor goes back to the start, so that the next line of output takes the bar's place.
        sys.stderr.write(f"\x1b[2K{bar:─<{_WIDTH}} {steps}/{self.until} steps{pace}\r")
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the bar as it is, and let later output begin on a new line."""
        if self._shown_s:
            self._shown_s = 0.0
            sys.stderr.write("\n")
            sys.stderr.flush()
