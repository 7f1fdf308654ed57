"""What a job of this experiment has left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.pipeline.present import whole


@dataclass(kw_only=True)
class Told:
    """What a job has left in its folder."""

    journals: Mapping[str, Sequence[Mapping[str, Any]]]
    lines: set[str]
    """Steps, and the digest of the whole model at the end."""
    parameters: set[str]
    """After each step, of whoever had them."""
    overshoots_s: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    """Of one core, by member."""
    live_bytes: list[int] = field(default_factory=list)
    """Of the member that held most, by step."""
    killed_s: float | None = None

    def is_that_of(self, whole: Told) -> bool:
        """Whether nothing differs from a job of one, which has everything."""
        return self.lines == whole.lines and self.parameters <= whole.parameters


def told(folder: Path) -> Told:
    """Read it."""
    journals = {path.stem: journal(path) for path in sorted((folder / "members").glob("*.jsonl"))}
    found = Told(journals=journals, lines=_lines(folder, "steps"), parameters=_lines(folder, "parameters"))
    for path in folder.glob("overshoot-*.txt"):
        *overshoots, share = map(float, path.read_text().splitlines())
        found.overshoots_s += overshoots
        found.shares.append(share)
    counted = [list(map(int, path.read_text().splitlines())) for path in folder.glob("bytes-*.txt")]
    found.live_bytes = [max(each) for each in zip(*counted, strict=True)]
    return found


def _lines(folder: Path, what: str) -> set[str]:
    found = {line for path in folder.glob(f"{what}-*.txt") for line in path.read_text().splitlines()}
    return whole(found) if what == "parameters" else {line for line in found if len(line.split()) == 3}


def journal(path: Path) -> list[Mapping[str, Any]]:
    """Its lines."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass  # the last line of a member that was killed
    return found
