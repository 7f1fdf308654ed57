"""Processes with a deadline: of the experiment with accelerators, and of `make test-gpu`."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from experiments.accelerator import commands
from experiments.accelerator.commands import EndedError


def test_a_process_that_hangs_is_killed_with_what_it_started_and_its_last_words_are_kept(tmp_path: Path) -> None:
    child = "import subprocess, sys; sleeping = subprocess.Popen(['sleep', '300'], start_new_session=True)"
    program = f"{child}; print('begun', sleeping.pid, flush=True); import time; time.sleep(300)"
    with pytest.raises(EndedError, match=r"a job was killed: not done within 1 s; its last words: begun"):
        commands.run("a job", ["-c", program], tmp_path / "output.txt", deadline_s=1.0)
    pid = int((tmp_path / "output.txt").read_text().split()[1])
    until_s = time.monotonic() + 5
    while is_alive(pid) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_that_fails_is_told_with_its_code(tmp_path: Path) -> None:
    with pytest.raises(EndedError, match="ended with 3"):
        commands.run("a job", ["-c", "import sys; sys.exit(3)"], tmp_path / "output.txt", deadline_s=30)


def test_nothing_begins_once_the_program_is_about_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "_over", threading.Event())
    ended: list[str] = []

    def endless() -> None:
        try:
            commands.run("a job", ["-c", "import time; time.sleep(300)"], tmp_path / "output.txt", deadline_s=100)
        except EndedError as error:
            ended.append(str(error))

    thread = threading.Thread(target=endless)
    thread.start()
    while not (tmp_path / "output.txt").exists():
        time.sleep(0.01)
    commands.end_all()
    thread.join(10)
    assert len(ended) == 1
    with pytest.raises(EndedError, match="not begun"):
        commands.run("a job", ["-c", ""], tmp_path / "output.txt", deadline_s=10)


def test_what_jobs_share_is_made_once_and_others_do_not_wait_for_it() -> None:
    shared = commands.Once()
    made, begun, may_end = [], threading.Event(), threading.Event()

    def make() -> str:
        made.append(1)
        begun.set()
        assert may_end.wait(10)
        return "a"

    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(shared.get, "shared", make)]
        assert begun.wait(10)
        found.append(pool.submit(shared.get, "shared", make))
        assert shared.get("other", lambda: "b") == "b"
        may_end.set()
        assert [each.result() for each in found] == ["a", "a"]
    assert made == [1]
