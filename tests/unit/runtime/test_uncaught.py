"""What a script's screen shows of an exception that ends it: what the launcher says is not said twice."""

from __future__ import annotations

import sys
import traceback

import pytest

from elastrain.errors import ConfigError, DivergedError, ElastrainError, NoRoomError, StateLostError, StoppedError
from elastrain.protocol import agent_messages as am
from elastrain.runtime.io.agent_link import AgentLink
from elastrain.runtime.loop.exit_report import ExitReport, wrong_input_shown
from elastrain.runtime.settings import Settings, stages_of


class Told:
    """The launcher's ear: a channel without a socket."""

    def __init__(self) -> None:
        self.words: list[tuple[type, str]] = []
        self.tracebacks: list[str] = []

    def send(self, message: am.FromWorker, *, fd: int | None = None) -> None:
        said = message.signature if isinstance(message, am.Failed) else getattr(message, "sentence", "")
        self.words.append((type(message), said))
        self.tracebacks += [message.traceback] if isinstance(message, am.Failed) else []


def _end_with(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[type, str]], list[str]]:
    """What the launcher is told, and what is shown, as a script with a launcher ends with this."""
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(str(error)))
    told, left = Told(), []
    words = ExitReport(AgentLink("m0", told), lambda: left.append(True))  # type: ignore[arg-type]  # a fake
    words.take_hook()
    sys.excepthook(type(error), error, None)
    assert words.has_left
    assert left == [True]
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


def test_what_is_no_fault_of_the_script_is_one_sentence_on_its_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told, shown = _end_with(StoppedError("stopped by SIGTERM"), monkeypatch)
    assert (told, shown) == ([], [])
    assert capsys.readouterr().err == "elastrain: stopped by SIGTERM\n"


def test_wrong_input_is_a_sentence_with_the_scripts_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(ConfigError) as raised, wrong_input_shown():
        stages_of(2, 3)
    sys.excepthook(raised.type, raised.value, raised.tb)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elastrain: {__file__}:")
    assert line.endswith(str(raised.value))


def test_wrong_input_with_a_launcher_is_said_by_that_alone_with_the_scripts_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: pytest.fail("Python's traceback"))
    told = Told()
    words = ExitReport(AgentLink("m0", told), lambda: None)  # type: ignore[arg-type]  # a fake
    words.take_hook()
    with pytest.raises(ConfigError) as raised:
        stages_of(2, 3)
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err == ""
    assert told.words == [(am.Failed, f"ConfigError: {raised.value}")]
    (traceback,) = told.tracebacks
    assert traceback.startswith(f"{__file__}:")
    assert traceback.endswith(f": {raised.value}\n")


def test_the_line_is_one_of_the_script_and_of_no_code_that_was_made(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as raised, wrong_input_shown():
        Settings(backups=-3, seed=0, run_length=1, loss_scale=None, deterministic=False)
    sys.excepthook(raised.type, raised.value, raised.tb)
    assert capsys.readouterr().err.startswith(f"elastrain: {__file__}:")


def test_what_still_leaves_the_loop_is_shown_and_told_to_nobody(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *_: pytest.fail("Python's traceback"))
    told = Told()
    words = ExitReport(AgentLink("m0", told), lambda: None)  # type: ignore[arg-type]  # a fake
    words.take_hook()
    words.give_hook_back(raised=True)
    sys.excepthook(ConfigError, ConfigError("not now"), None)
    assert (told.words, capsys.readouterr().err) == ([], "elastrain: not now\n")


def test_an_interrupt_is_shown_and_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _end_with(KeyboardInterrupt("stop"), monkeypatch) == ([], ["stop"])


def test_what_the_engine_has_reported_is_not_told_twice() -> None:
    told = Told()
    words = ExitReport(AgentLink("m0", told), lambda: None)  # type: ignore[arg-type]  # a fake
    error = ValueError("x" * 1_000_000)
    words.report(error)
    words.report(error)
    ((kind, signature),) = told.words
    assert kind is am.Failed
    assert len(signature) < 5000, "it has to fit into one line"


OF_TWO = [
    "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0",
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
    "indices should be either on cpu or on the same device as the indexed tensor (cuda)",
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same",
    "Input type (torch.cuda.HalfTensor) and weight type (torch.FloatTensor) should be the same or input should be a M",
]
OF_ONE = [
    "Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same",
    "Input type (torch.FloatTensor) and weight type (torch.HalfTensor) should be the same",
    "Input type (float) and bias type (c10::Half) should be the same",
    "CUDA out of memory. Tried to allocate 2.00 GiB",
]


@pytest.mark.parametrize(("text", "count"), [*((text, 1) for text in OF_TWO), *((text, 0) for text in OF_ONE)])
def test_an_error_about_tensors_on_two_devices_says_how_to_move_a_batch(
    text: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = RuntimeError(text)
    told, shown = _end_with(error, monkeypatch)
    assert told == [(am.Failed, f"RuntimeError: {text}")], "the words by which failures are compared stay torch's"
    assert shown == [text]
    assert "".join(traceback.format_exception(error)).count("(batch.to(device))") == count
