"""The lines of a run's logs, read while processes may still write them, and after they were killed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from elastrain.launcher.shared.rundir import RunDir

Line = dict[str, Any]

_SKIPPED = (b'"event":"micro_batch"', b'"event":"advance"', b'"event":"task"', b'"event":"copy"')
"""Most of a journal's lines, which the report does not need. They are skipped before they are parsed."""
_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(kw_only=True)
class RunLogs:
    """Lines of the event log and of each member's journal, in the order of their times."""

    events: list[Line] = field(default_factory=list)
    journals: dict[str, list[Line]] = field(default_factory=dict)
    unreadable: int = 0
    """Number of lines that are cut off or damaged, and left out."""


def read_logs(run: RunDir) -> RunLogs:
    """Return what can be read of a run's logs. Missing files count as empty ones."""
    logs = RunLogs()
    logs.events = _sorted(_lines(run.events, logs))
    for path in sorted((run.journals / "members").glob("*.jsonl")):
        logs.journals[path.stem] = _sorted(_lines(path, logs))
    return logs


def _sorted(lines: Iterator[Line]) -> list[Line]:
    return sorted(lines, key=lambda line: float(line["t"]))


def _lines(path: Path, logs: RunLogs) -> Iterator[Line]:
    try:
        file = path.open("rb")
    except OSError:
        return
    with file:
        for text in file:
            if any(word in text for word in _SKIPPED) or not text.strip():
                continue
            line = _parsed(text)
            if line is None:
                logs.unreadable += 1
            else:
                yield line


def _parsed(text: bytes) -> Line | None:
    """Return the line, or None if it is cut off, damaged, or has no time or event."""
    try:
        line = _decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    is_whole = isinstance(line.get("t"), int | float) and isinstance(line.get("event"), str)
    return line if is_whole else None
