"""When a driver takes a fault to have struck."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.processes import Scheduled
from experiments.faults import driver as driving
from experiments.faults import train
from experiments.faults.cells import Cell, Way
from experiments.faults.driver import Driver, StandstillError

CELL = Cell(way=Way(kind="flip", words="--where taken"), phase="apply")


def write(path: Path, **line: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"t": time.monotonic(), **line}) + "\n")


def test_what_struck_just_before_a_fault_was_asked_for_is_not_taken_for_it(tmp_path: Path) -> None:
    start = {"event": "worker_start", "member": "m1", "pid": 1, "slot": 0, "source": "agent:node0"}
    write(tmp_path / "events.jsonl", **start)
    journal = tmp_path / "members" / "m1.jsonl"
    write(journal, event="fault", step=4, phase="commit")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        driver = Driver(folder=tmp_path, process=process, size=1, steps=9, patience=0.005)
        driver.follower.look()
        before = set(driver._struck_so_far())
        assert len(before) == 1
        with pytest.raises(StandstillError, match="apply strikes"):
            driver._seen(CELL, ("m1",), before)
        write(journal, event="fault", step=6, phase="apply")
        assert driver._seen(CELL, ("m1",), before).at_s > max(at_s for _, at_s in before)
        process.kill()


def test_a_job_that_still_commits_has_time_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "END_S", 0.05)
    monkeypatch.setattr(driving, "COMMITS_S", 1.0)
    view = {"event": "view", "generation": 1, "members": ["m1"], "reason": "", "source": "agent:node0"}
    write(tmp_path / "events.jsonl", event="worker_start", member="m1", pid=1, slot=0, source="agent:node0")
    write(tmp_path / "events.jsonl", **view)
    passed = {"event": "passed", "generation": 1, "loss": 1.0, "samples": 1, "fingerprint": 0}
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        driver = Driver(folder=tmp_path, process=process, size=1, steps=9)
        looks = 0

        def after_some_commits() -> bool:
            nonlocal looks
            looks += 1
            write(tmp_path / "members" / "m1.jsonl", step=looks, **passed)
            return looks >= 20

        driver.wait_for_the_end(after_some_commits)  # 0.01 s between two looks: for longer than the end may take
        assert looks >= 20
        with pytest.raises(StandstillError, match="the job ends"):
            driver.wait_for_the_end()
        process.kill()


def test_a_member_that_waits_for_a_processor_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driving, "END_S", 0.05)
    waited_s = iter([0.0, 0.04, 0.04, 0.08, 0.08, 0.09])
    monkeypatch.setattr(driving, "scheduled", lambda pid: Scheduled(waited_s=next(waited_s)))
    write(tmp_path / "events.jsonl", event="worker_start", member="m1", pid=1, slot=0, source="agent:node0")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        driver = Driver(folder=tmp_path, process=process, size=1, steps=9)
        driver.follower.look()
        with pytest.raises(StandstillError, match="the job ends"):
            driver.wait_for_the_end()
        assert list(waited_s) == []  # in two of three rounds it lacked a processor for most of the time
        process.kill()


def test_a_job_in_which_nothing_is_struck_any_more_is_told_a_last_step(tmp_path: Path) -> None:
    """All 240 steps were made, though nothing is to be seen any more in most of them."""
    start = {"event": "worker_start", "member": "m1", "pid": 1, "slot": 0, "source": "agent:node0"}
    write(tmp_path / "events.jsonl", **start)
    write(
        tmp_path / "members" / "m1.jsonl", event="passed", step=50, generation=1, loss=1.0, samples=[], fingerprint=""
    )
    (tmp_path / "brake").touch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        driver = Driver(folder=tmp_path, process=process, size=1, steps=240)
        driver.follower.look()
        assert driver.step == 50
        assert driver.end_soon() == 80 == train.enough_steps(tmp_path, 240)
        assert not (tmp_path / "brake").exists()
        driver.steps = 60
        (tmp_path / "enough").unlink()
        assert driver.end_soon() == 60 == train.enough_steps(tmp_path, 60)
        assert not (tmp_path / "enough").exists(), "it ends there anyhow"
