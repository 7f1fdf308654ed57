"""What a command says to input that it cannot use: one sentence and exit code 2 or 1; never a traceback."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.cli import command_line
from elastrain.launcher.core import Core
from elastrain.launcher.shared.job_values import JobConfig
from elastrain.launcher.shared.operator_messages import problem_of
from elastrain.launcher.shared.rundir import RunDir

STATE = describe(Core(JobConfig(workers=1), (), choose=lambda members: members[0]), "job", 0.0)
CHAOS = ("chaos", "--seed", "1", "--run")
KILL = ("inject", "kill", "--target", "member:m1", "--run")
NO_FILE = "x" * 5000
"""No file system has a name of this length."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTRAIN_HOME", str(tmp_path / "home"))


def said(*words: str) -> Result:
    """What came of a command; the exceptions that it does not answer for are raised."""
    return CliRunner().invoke(command_line.app, words, catch_exceptions=False)


def run_with(folder: Path, state: object) -> RunDir:
    """A run that has ended, and left this state."""
    run = RunDir(path=folder)
    run.events.write_text(json.dumps({"event": "start", "wall": 1.0}) + "\n")
    run.state.write_text(json.dumps(state))
    return run


@pytest.mark.parametrize(
    "command", [("status",), ("status", "--run"), ("top",), ("offload", "show"), KILL, CHAOS], ids=" ".join
)
@pytest.mark.parametrize("name", ["nowhere", "", "a/b", "..", NO_FILE])
def test_a_run_that_is_not_there_is_named(command: tuple[str, ...], name: str) -> None:
    result = said(*command, name)
    assert result.exit_code == 2
    assert "there is no run" in result.stderr and len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", [("status",), ("status", "--json"), ("top",), CHAOS[:-1]], ids=" ".join)
@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({}, "it lacks 'job'"),
        (STATE | {"members": 3}, "members: Expected `array`, got `int`"),
        (STATE | {"members": [{"id": "m0"}]}, "members: Object missing required field"),
        ([], "is not a run's state"),
    ],
    ids=["empty", "a number", "a member without a rank", "a list"],
)
def test_a_state_that_cannot_be_shown_is_refused(
    tmp_path: Path, command: tuple[str, ...], state: object, problem: str
) -> None:
    run = run_with(tmp_path, state)
    result = said(*command, str(run.path))
    assert result.exit_code == 2
    assert f"{run.state} is not a run's state" in result.stderr and problem in result.stderr


def test_what_an_agent_says_of_itself_can_be_shown(tmp_path: Path) -> None:
    assert problem_of(STATE) == problem_of(json.loads(json.dumps(STATE))) == ""
    run = run_with(tmp_path, STATE | {"exit_code": 0})
    assert said("status", str(run.path)).exit_code == 0


@pytest.mark.parametrize("command", [("status",), KILL, CHAOS], ids=" ".join)
def test_an_agent_that_answers_with_something_else_is_named(tmp_path: Path, command: tuple[str, ...]) -> None:
    run = run_with(tmp_path, STATE)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(run.control))
        listener.listen()

        def answer() -> None:
            with listener.accept()[0] as asked:
                asked.recv(1 << 16)
                asked.sendall(b"garbage\n")

        thread = threading.Thread(target=answer)
        thread.start()
        result = said(*command, str(run.path))
        thread.join(10)
    assert result.exit_code == 1
    assert f"{run.control} answers as no agent of this version does" in result.stderr


def test_a_run_is_named_as_an_argument_or_with_an_option(tmp_path: Path) -> None:
    run = str(run_with(tmp_path, STATE | {"exit_code": 0}).path)
    shown = [said("status", *words).stdout for words in ([run], ["--run", run], [run, "--run", run])]
    assert shown[0].startswith("job         job") and len(set(shown)) == 1
    result = said("status", run, "--run", "another")
    assert result.exit_code == 2
    assert f"two runs are named, {run!r} and --run 'another': name one" in result.stderr


@pytest.mark.parametrize("words", [("run",), ("doctor", "--memory")], ids=" ".join)
@pytest.mark.parametrize("name", ["nowhere.py", "", NO_FILE])
def test_a_script_that_no_file_is_named_after_is_missing(words: tuple[str, ...], name: str) -> None:
    result = said(*words, name)
    assert result.exit_code == 2
    assert "there is no script" in result.stderr


@pytest.mark.parametrize("option", ["--run-dir", "--log-dir", "--checkpoint-dir"])
def test_a_folder_without_a_name_is_not_the_working_directory(option: str) -> None:
    result = said("run", option, "", __file__)
    assert result.exit_code == 2
    assert option in result.stderr and "is empty" in result.stderr


@pytest.mark.parametrize("option", ["--join-timeout", "--last-call", "--park-timeout", "--hang-timeout", "--key-ttl"])
@pytest.mark.parametrize("value", ["inf", "1e300"])
def test_a_wait_without_an_end_is_refused(option: str, value: str) -> None:
    """The kernel's clocks and the store's leases take no such number: agents ended with a traceback."""
    result = said("run", option, value, __file__)
    assert result.exit_code == 2
    assert f"{option} {float(value):g}: at most 31536000 seconds" in result.stderr


def test_faults_at_random_need_a_mean_time_that_ends(tmp_path: Path) -> None:
    run = run_with(tmp_path, STATE | {"armed": True})
    assert said("chaos", "--seed", "1", "--mtbf", "inf", "--run", str(run.path)).exit_code == 2
