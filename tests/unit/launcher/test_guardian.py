"""What a guardian knows before anything can happen to its owner."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastrain.launcher.agent import guardian
from elastrain.launcher.agent.guardian import Guardian
from tests.support.waiting import until


def test_it_knows_the_mark_from_its_command_line_also_when_it_begins_again() -> None:
    with Guardian("TEST", dict(os.environ)) as owner:
        [[name, value]] = owner.mark.items()
        first = owner.pid
        assert f"{name}={value}" in _command_line(first)
        owner.begin_again()
        assert owner.pid != first
        assert f"{name}={value}" in _command_line(owner.pid)


def test_without_a_mark_it_touches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = list[bytes]()
    monkeypatch.setattr(guardian, "_end_all", lambda mark, sessions: ended.append(mark))  # else all processes end
    with pytest.raises(AssertionError, match="every process"):
        guardian._guard(b"")
    assert not ended


def _command_line(pid: int) -> list[str]:
    """A process that has just become its program shows it a moment later."""
    path = Path(f"/proc/{pid}/cmdline")
    return until(path.read_text, 10, "its command line").split("\0")
