"""The bar of committed steps: one line of a terminal, and nothing where there is none."""

from __future__ import annotations

import io
import sys

import pytest

from elastrain.runtime.loggers.progress_bar import StepBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    moments = iter([0.0, 0.05, 10.0, 10.05])
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    bar = StepBar()
    bar.until = 4
    for steps in range(1, 5):
        bar.show(steps)
    bar.end()
    return stream.getvalue()


def test_a_terminal_shows_how_many_steps_are_committed_and_how_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(Terminal(), monkeypatch)
    *_, before, last = text.split("\x1b[2K")
    assert before == f"{'━' * 22}{'─' * 8} 3/4 steps, 0.20 steps/s\r"
    assert last == f"{'━' * 30} 4/4 steps, 0.30 steps/s\r\n"


def test_a_pipe_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(io.StringIO(), monkeypatch) == ""
