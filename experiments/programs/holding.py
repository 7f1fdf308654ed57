"""Waiting between steps for what a way needs: a newcomer that is ready, a checkpoint that is on the disk."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HOLD = "PROGRAMS_HOLD"
WAIT_S = 20.0
"""Less than what code between two steps may take."""
PAUSE_S = 0.15
"""Between steps while a member is missing, so that a newcomer that is ready joins before the end."""


@dataclass(frozen=True, kw_only=True)
class Hold:
    """The steps after which members wait, and for what: parts of one line of the job's events."""

    events: str = ""
    """The file of the job's events."""
    members: int = 0
    waits: Sequence[tuple[int, Sequence[str]]] = ()

    def told(self) -> dict[str, str]:
        """Return the environment that tells it to a worker."""
        return {HOLD: json.dumps(vars(self))}

    def between(self, step: int, job: Any) -> None:
        """Wait after a step, until the event is there or `WAIT_S` are over."""
        for after, parts in self.waits:
            if step == after:
                _wait_for(Path(self.events), parts)
        if self.waits and step > min(after for after, _ in self.waits) and job.world_size < self.members:
            time.sleep(PAUSE_S)


def read_hold() -> Hold:
    """Return what the environment says; nothing to wait for without it."""
    return Hold(**json.loads(os.environ.get(HOLD, "{}")))


def _wait_for(events: Path, parts: Sequence[str]) -> None:
    until_s = time.monotonic() + WAIT_S
    while time.monotonic() < until_s:
        if any(all(part in line for part in parts) for line in events.read_text(errors="replace").splitlines()):
            return
        time.sleep(0.02)
