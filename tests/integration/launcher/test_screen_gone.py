"""A screen that goes away, and signals that were ignored from the start, end no job and hold none up."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.nodes_harness import STUB, NodesJob

BEFORE = """
import os, sys
reader, writer = os.pipe()
os.set_blocking(writer, False)
try:
    while {full}:
        os.write(writer, bytes(4096))
except BlockingIOError:
    pass
os.set_blocking(writer, True)
os.set_inheritable(reader, {full})
os.dup2(writer, 1)
os.dup2(writer, 2)
os.execvp(sys.argv[1], sys.argv[1:])
"""
CHATTER = ("--chatter", "4000")


def onto(tmp_path: Path, *options: str, full: bool) -> NodesJob:
    """A job whose screen is a pipe that nobody has open to read, or, `full`, from which nobody reads."""
    inside = (sys.executable, "-c", BEFORE.format(full=full))
    return NodesJob(tmp_path, *options, arguments=CHATTER, inside=inside, script=STUB, held="--finish")


def ignoring(tmp_path: Path, signals: str, *options: str, arguments: tuple[str, ...] = ()) -> NodesJob:
    inside = ("sh", "-c", f"trap '' {signals}; exec \"$@\"", "sh")
    return NodesJob(tmp_path, *options, arguments=arguments, inside=inside, script=STUB, held="--finish")


@pytest.mark.parametrize(
    ("full", "options"), [(False, ()), (False, ("--tee", "3")), (True, ("--tee", "3")), (True, ("--local-nodes", "2"))]
)
def test_nobody_reads_what_a_job_says(tmp_path: Path, full: bool, options: tuple[str, ...]) -> None:
    with onto(tmp_path, "--nproc-per-node", "2", *options, full=full) as job:
        job.wait_step(1)
        job.kill("m1")
        assert "m1" not in job.wait_view(2)
        assert job.finish().exit_code == 0
        said = "".join(each["text"] for each in job.events("not_shown"))
        assert "generation 2: m1 lost" in said and "elastrain: finished after step" in said
        assert said.count("chatter") > 8000
        job.assert_nothing_left()


@pytest.mark.parametrize("options", [(), ("--local-nodes", "2")], ids=["alone", "nodes"])
def test_signals_that_are_ignored_stay_so(tmp_path: Path, options: tuple[str, ...]) -> None:
    with ignoring(tmp_path, "HUP INT TERM QUIT", "--nproc-per-node", "2", *options) as job:
        job.wait_step(1)
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            os.killpg(job.process.pid, number)
            for pid in job.sessions():
                os.kill(pid, number)
        assert job.finish().exit_code == 0
        assert {each["generation"] for each in job.events("view")} == {1}
        job.assert_nothing_left()


def test_a_job_that_fails_ends_although_sigterm_is_ignored(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--nproc-per-node", "1", "--stop-grace", "1")
    with ignoring(tmp_path, "TERM", *options, arguments=("--raise-at-import", "m1")) as job:
        assert job.end().exit_code == 1
        job.assert_nothing_left()


@pytest.mark.parametrize("options", [(), ("--local-nodes", "2")], ids=["alone", "nodes"])
def test_a_terminal_that_is_closed_ends_a_job_as_sigterm_does(tmp_path: Path, options: tuple[str, ...]) -> None:
    with NodesJob(tmp_path, "--nproc-per-node", "2", *options, arguments=(), script=STUB, held="--finish") as job:
        job.wait_step(1)
        os.killpg(job.process.pid, signal.SIGHUP)
        assert job.end().exit_code == 128 + signal.SIGHUP
        assert "stopped by SIGHUP" in job.text()
        job.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGXCPU], ids=lambda each: each.name)
def test_any_other_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with NodesJob(tmp_path, "--nproc-per-node", "2", arguments=(), script=STUB, held="--finish") as job:
        job.wait_step(1)
        os.kill(job.process.pid, number)
        assert job.end().exit_code == -number
        job.assert_nothing_left()
