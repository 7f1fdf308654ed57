"""The lines that a script logs, and the decision from which line on a new writer goes on. Pure.

Every member keeps the last lines, because any of them may have to write them. Lines of a step are *confirmed* once the
next step is committed in the same view: its members entered that step after their writer had written these lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

Scalar = None | bool | int | float | str
KEPT_LINES = 4096
"""Number of confirmed lines that are kept all the same, for a file that lacks them because its disk was full."""


@dataclass(frozen=True)
class Line:
    """One call of `job.log`: the committed step that it came after, and its values by name."""

    step: int
    values: Mapping[str, Scalar]


class LogBook:
    """The last lines of a job. Lines are numbered from 0, alike on all members."""

    def __init__(self, run: str, kept_lines: int = KEPT_LINES) -> None:
        self.run = run
        """Id of the run, the same for all members, lives and resumes."""
        self.count = 0
        """Number of lines that were logged."""
        self._kept_lines = kept_lines
        self._lines: deque[Line] = deque()
        self._confirmed = -1
        """Newest step whose lines are confirmed."""
        self.known_from = 0
        """First step of which all lines are kept."""
        self._generation: int | None = None
        """Generation of the newest record; None before the first one that this member passed."""

    def add(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Add the next line. `step`: the step that was committed last."""
        self._lines.append(Line(step, values))
        self.count += 1

    def committed(self, step: int, generation: int) -> None:
        """Note the commit of a step, and drop the oldest confirmed lines if too many are kept."""
        if generation == self._generation:
            self._confirmed = max(self._confirmed, step - 1)
        self._generation = generation
        while len(self._lines) > self._kept_lines and (oldest := self._lines[0].step) <= self._confirmed:
            while self._lines and self._lines[0].step == oldest:
                self._lines.popleft()
            self.known_from = oldest + 1

    def goes_on_behind(self, newest: int, *, is_own: bool = False) -> int:
        """Return the step behind which a new writer goes on. It removes later lines, and writes them again.

        Args:
            newest: Step of the last line of this run that is in the file; -1 if there is none.
            is_own: True if this member has written the file so far.
        """
        # The last step in the file may lack some of its lines. Lines that are not confirmed may be of a former life.
        whole = newest - 1 if is_own else min(newest - 1, self._confirmed)
        return max(whole, self.known_from - 1)

    def behind(self, step: int) -> list[Line]:
        """Return all kept lines of later steps."""
        return [line for line in self._lines if line.step > step]

    def newer(self, number: int) -> list[Line]:
        """Return the lines from the one with this number on."""
        first = self.count - len(self._lines)
        return list(islice(self._lines, max(0, number - first), None))

    def state(self) -> dict[str, Any]:
        """Return what newcomers and resumed jobs have to know, as plain values for JSON."""
        lines = [[line.step, dict(line.values)] for line in self.behind(self._confirmed)]
        return {"run": self.run, "count": self.count, "confirmed": self._confirmed, "lines": lines}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over the state of another member, or of a checkpoint."""
        self.run, self.count, self._confirmed = state["run"], state["count"], state["confirmed"]
        self._lines = deque(Line(step, values) for step, values in state["lines"])
        self.known_from = self._confirmed + 1
        self._generation = None  # generations of another life say nothing
