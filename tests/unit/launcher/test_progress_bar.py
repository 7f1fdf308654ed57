"""Long work shows how far it is: what is said, and what the agent shows of its workers' reading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from elastrain.base.resume import Resume
from elastrain.launcher.agent.command_runner import CommandRunner
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.core.cluster import Cluster
from elastrain.launcher.shared import console
from elastrain.launcher.shared.console import ProgressBar
from elastrain.launcher.shared.job_values import Life
from elastrain.launcher.start.run_options import OutputPlan, RunOptions, StartWish
from elastrain.launcher.start.start_checkpoint import find_start
from elastrain.protocol.agent_messages import Reading
from elastrain.snapshot.durable.places.port import place_at
from tests.support import checkpoints
from tests.unit.launcher.test_core import Job

RESUME = Resume(place="/data", name="life-0001-step-0000000040", step=40)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "EVERY_S", 0.0)


def told(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("elastrain: ") for line in capsys.readouterr().err.splitlines()]


def test_a_line_now_and_then_says_how_much_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = ProgressBar("verifying x", 3000)
    shown.advance(1000)
    shown.advance(4000)
    assert told(capsys) == [f"verifying x: {each} bytes" for each in ("3,000", "1,000 of 3,000", "3,000 of 3,000")]
    monkeypatch.setattr(console, "EVERY_S", 60.0)
    shown.advance(1)
    assert told(capsys) == []


def runner(*, shares_screen: bool = False, **config: Any) -> CommandRunner:
    """Of an agent whose job of two workers goes on from a checkpoint; what its core commands is not done."""
    job = Job(2, life=Life(resume=RESUME), **config)
    for member in ("m0", "m1"):
        job.hello(member)
    unused: Any = None
    made = CommandRunner(job.core, unused, unused, unused, shares_screen=shares_screen)
    made.queue.add = lambda commands: None  # type: ignore[method-assign]
    return made


def read(runner: CommandRunner, member: str, done_bytes: int) -> None:
    runner.happen(ev.WorkerSpoke(member=member, message=Reading(done_bytes=done_bytes, size_bytes=1000)))


def test_one_worker_of_a_node_stands_for_all_until_it_has_read_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Mock()
    monkeypatch.setattr(ProgressBar, "close", closed)
    agent = runner()
    for member, done_bytes in (("m1", 200), ("m0", 300), ("m1", 1000), ("m0", 1000)):
        read(agent, member, done_bytes)
    assert told(capsys) == [f"m0 is reading the checkpoint: {each} of 1,000 bytes" for each in ("300", "1,000")]
    closed.assert_called_once()


def test_who_ends_while_it_reads_leaves_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Mock()
    monkeypatch.setattr(ProgressBar, "close", closed)
    agent = runner()
    read(agent, "m0", 300)
    agent.happen(ev.WorkerDied(member="m0", source="mutex", at_s=0.0))
    agent.happen(ev.WorkerExited(member="m0", exit_code=-9))
    closed.assert_called_once()


def test_of_simulated_nodes_the_first_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for first_rank, shares_screen, is_shown in ((0, True, True), (1, True, False), (1, False, True)):
        agent = runner(shares_screen=shares_screen)
        with monkeypatch.context() as patched:
            patched.setattr(Cluster, "first_rank", first_rank)
            read(agent, "m0", 300)
        assert bool(told(capsys)) is is_shown


def test_a_checkpoint_that_is_read_to_its_end_before_a_job_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    checkpoints.save(place_at(str(tmp_path)), 10)
    options = RunOptions(job="j", script=Script.of("t", ()), target="t", resume=StartWish(source=str(tmp_path)))
    find_start(options)
    first, *_, last = told(capsys)
    size = first.removeprefix("checking life-0000-step-0000000010: ")
    assert last == f"checking life-0000-step-0000000010: {size.removesuffix(' bytes')} of {size}"
    find_start(replace(options, output=OutputPlan(shows_progress=False)))
    assert told(capsys) == []
