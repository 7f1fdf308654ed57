"""What a script's screen shows of an exception that ends it: what the launcher says is not said twice."""

from __future__ import annotations

import sys

import pytest

import elastrain
from elastrain import agent_messages as am
from elastrain.errors import DivergedError, ElastrainError, NoRoomError, StateLostError


class Told:
    """The launcher's ear."""

    def __init__(self) -> None:
        self.words: list[tuple[type, str]] = []

    def send(self, message: am.FromWorker) -> None:
        said = message.signature if isinstance(message, am.Failed) else getattr(message, "sentence", "")
        self.words.append((type(message), said))


def _end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[type, str]], list[str]]:
    """What the launcher is told, and what is shown, as a script with a launcher ends with this."""
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(str(error)))
    job, told = elastrain.init(), Told()
    job._channel = told  # type: ignore[assignment]  # a launcher without a socket
    sys.excepthook(type(error), error, None)
    return told.words, shown


@pytest.mark.parametrize(
    ("kind", "word"), [(NoRoomError, am.NoRoom), (StateLostError, am.LostState), (DivergedError, am.Diverged)]
)
def test_what_ends_the_job_is_one_sentence_of_the_launchers_and_no_traceback_beside_it(
    kind: type[ElastrainError], word: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, shown = _end_with(kind("shard 3 is gone"), monkeypatch)
    assert told == [(word, "shard 3 is gone")]
    assert shown == []


def test_the_scripts_own_exception_is_shown_as_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    told, shown = _end_with(ValueError("odd batch"), monkeypatch)
    assert told == [(am.Failed, "ValueError: odd batch")]
    assert shown == ["odd batch"]
