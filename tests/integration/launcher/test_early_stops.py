"""Ctrl-C and SIGTERM in the first moments of a command: a sentence and the signal's exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.nodes_harness import NodesJob
from tests.support.waiting import until

BEFORE_THE_COMMANDS = """
import os, signal, sys, types
from elastrain.launcher.cli.main import main
stopped = types.SimpleNamespace(app=lambda prog_name: os.kill(os.getpid(), {number}))
sys.modules["elastrain.launcher.cli.command_line"] = stopped
main()
"""
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_commands_are_imported_ends_with_a_sentence(number: signal.Signals) -> None:
    code = BEFORE_THE_COMMANDS.format(number=int(number))
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (ran.returncode, ran.stderr) == (128 + number, f"elastrain: stopped by {number.name}\n")


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)" + BEFORE_THE_COMMANDS.format(number=2)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert (ran.returncode, ran.stderr) == (0, "")


IN_A_FINALIZER = """
import os, sys, types
from elastrain.launcher.cli.main import main
class Freed:
    def __del__(self):
        os.kill(os.getpid(), {number})
        for _ in range(1000): pass  # the handler runs here
def app(prog_name):
    from elastrain.launcher.shared.process_environment import StopSignals
    Freed()
    sys.exit(StopSignals().take()[0])
sys.modules["elastrain.launcher.cli.command_line"] = types.SimpleNamespace(app=app)
main()
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_comes_in_a_finalizer_is_not_lost(number: signal.Signals) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_FINALIZER.format(number=int(number))], capture_output=True, text=True, timeout=180
    )
    assert (ran.returncode, ran.stderr.splitlines()[0]) == (number, f"elastrain: stopped by {number.name}")


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("after_s", "to_all"), [(0.0, False), (0.0, True), (0.4, False), (1.0, True)])
def test_nodes_that_are_stopped_while_they_start_say_so(
    tmp_path: Path, number: signal.Signals, after_s: float, to_all: bool
) -> None:
    """`to_all`: as Ctrl-C in a terminal, which all processes of the command hear."""
    with NodesJob(tmp_path, "--local-nodes", "2", arguments=("--steps", "100000")) as job:
        until(job.run.path.exists, 60, "the command's first deed")
        time.sleep(after_s)  # whatever it is about: all of its moments are asked the same
        (os.killpg if to_all else os.kill)(job.process.pid, number)
        assert job.process.wait(180) == 128 + number, job.text()
        assert f"stopped by {number.name}" in job.text()
        assert "was lost" not in job.text() and "Traceback" not in job.text()
