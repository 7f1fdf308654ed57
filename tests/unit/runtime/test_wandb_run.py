"""Offline runs of Weights & Biases, read back from their files: one id, each step once, whoever wrote it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastrain.errors import ConfigError
from elastrain.runtime.loggers.wandb_run import Wandb
from tests.support.offline_runs import rows

wandb = pytest.importorskip("wandb", reason="wandb is not installed")

pytestmark = pytest.mark.slow

WRITER = """
import os, signal, sys
from elastrain.job.log_book import Line
from elastrain.runtime.loggers.wandb_run import Wandb
logger = Wandb("p", mode="offline", dir=sys.argv[1], config={"lr": 0.1})
print(logger.begin("a run"), flush=True)
first, last, cut, how = *map(int, sys.argv[2:5]), sys.argv[5]
logger.cut(cut)
for step in range(first, last):
    logger.write([Line(step, {"loss": step / 2})])
    logger.write([Line(step, {"second": "word"})])
if how == "kill":
    import time
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def write(folder: Path, first: int, last: int, cut: int = -1, how: str = "end") -> int:
    """What a process of its own does, which may be killed. Returns the newest step that it found."""
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(last), str(cut), how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360)
    assert done.returncode == (-signal.SIGKILL if how == "kill" else 0), done.stderr
    return int(done.stdout.split()[0])


def test_a_run_goes_on_behind_a_writer_that_was_killed_and_has_one_id(tmp_path: Path) -> None:
    assert write(tmp_path, 0, 5, how="kill") == -1
    written = [step for _, step, _ in rows(tmp_path, "loss")]
    assert written == list(range(4)), "the row of the last step is complete when the next one is logged"
    time.sleep(1.1)  # the names of wandb's folders have seconds
    assert write(tmp_path, 2, 8, cut=1) == 3
    assert rows(tmp_path, "loss") == [("a_run", step, step / 2) for step in range(8)]


FILLED = """
import sys, time
from elastrain.job.log_book import Line
from elastrain.runtime.loggers import wandb_run
logger = wandb_run.Wandb("p", mode="offline", dir=sys.argv[1])
logger.begin("a run")
logger.cut(-1)
logger.write([Line(0, {"loss": 0.0}), Line(1, {"loss": 0.5})])
room_bytes, wandb_run.ROOM_BYTES = wandb_run.ROOM_BYTES, 1 << 60
for call in (lambda: logger.write([Line(2, {"loss": 1.0})]), lambda: logger.begin("a run")):
    try:
        call()
    except OSError as error:
        print(error)
wandb_run.ROOM_BYTES = room_bytes
time.sleep(1.1)  # the names of wandb's folders have seconds
newest = logger.begin("a run")
logger.cut(newest)
logger.write([Line(step, {"loss": step / 2}) for step in range(newest + 1, 4)])
"""


def test_a_full_disk_is_an_error_before_a_line_is_lost_and_all_follow_when_there_is_room(tmp_path: Path) -> None:
    """wandb's own process would drop the lines."""
    done = subprocess.run([sys.executable, "-c", FILLED, str(tmp_path)], capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"bytes are free in {tmp_path}, less than") == 2
    assert rows(tmp_path, "loss") == [("a_run", step, step / 2) for step in range(4)]


def test_long_records_over_several_blocks_are_read(tmp_path: Path) -> None:
    write(tmp_path, 0, 900)
    assert [step for _, step, _ in rows(tmp_path, "loss")] == list(range(900))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mode": "away"}, "takes one of online, offline, disabled; got 'away'"),
        ({"id": "mine", "resume": "must"}, "chooses id and resume itself: leave it out"),
    ],
)
def test_options_that_the_logger_needs_for_itself_are_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Wandb("p", **options)


def test_a_run_that_is_disabled_writes_nothing(tmp_path: Path) -> None:
    logger = Wandb("p", mode="disabled", dir=tmp_path)
    assert logger.begin("a run") == -1
    logger.cut(-1)
    logger.write([])
    assert rows(tmp_path, "loss") == []


def test_a_server_that_is_away_is_said_and_the_lines_are_kept_offline(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def init(*, mode: str, **options: object) -> object:
        asked.append(mode)
        if mode == "online":
            raise wandb.errors.CommError("timed out")
        return real(mode=mode, **options)

    real = wandb.init
    monkeypatch.setattr(wandb, "init", init)
    logger = Wandb("p", dir=tmp_path)
    assert logger.begin("a run") == -1
    assert asked == ["online", "offline"]
    assert "wandb project p: the server is away (timed out); `wandb sync` sends what is in" in capfd.readouterr().err
    assert os.listdir(tmp_path) == ["wandb"]
    logger._run.finish()


def test_the_mode_is_that_of_the_environment_unless_the_script_says_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert Wandb("p", dir=tmp_path).begin("run") == -1 and not any(tmp_path.iterdir())
    monkeypatch.setenv("WANDB_MODE", "dryrun")
    with pytest.raises(ConfigError, match="or WANDB_MODE, takes one of online, offline, disabled; got 'dryrun'"):
        Wandb("p", dir=tmp_path)
