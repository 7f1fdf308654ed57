"""A simulated node that has been started hears what it is told, and Ctrl-C in a terminal reaches all that run in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FORKED = """
import time
from elastrain.launcher.simulated.node_starts import hear_signals

def node():
    hear_signals()
    time.sleep(30)
"""
COMMAND = """
import multiprocessing, os, signal
from forked import node
from elastrain.launcher.simulated.node_starts import begin, end_fork_server, start_fork_server

def main():
    signal.signal({number}, {handler})
    start_fork_server()
    to_all = {to_all}
    if to_all:
        os.killpg(0, {number})
    codes = []
    for _ in range(20):
        process = multiprocessing.get_context("forkserver").Process(target=node)
        begin(process)
        os.killpg(0, {number}) if to_all else os.kill(process.pid, {number})
        process.join({patience_s})
        codes.append(process.exitcode)
        process.kill()
        if {patience_s} < 10:
            break
    end_fork_server()
    print(*codes)

if __name__ == "__main__":
    main()
"""


def _run(tmp_path: Path, number: int, *, to_all: bool, handler: str, patience_s: int) -> tuple[str, str]:
    """What it prints of the nodes' exit codes, and what it says."""
    (tmp_path / "forked.py").write_text(FORKED)
    command = tmp_path / "command.py"
    command.write_text(COMMAND.format(number=number, handler=handler, to_all=to_all, patience_s=patience_s))
    ran = subprocess.run(
        [sys.executable, str(command)], capture_output=True, text=True, timeout=270, start_new_session=True
    )
    return ran.stdout.strip(), ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 15])
@pytest.mark.parametrize("to_all", [False, True])
def test_a_signal_right_after_a_node_was_started_ends_it_without_a_traceback(
    tmp_path: Path, number: int, to_all: bool
) -> None:
    """A fork of the fork server ignored Ctrl-C at first, then raised: ten of twenty went on, or showed a traceback."""
    said = _run(tmp_path, number, to_all=to_all, handler="lambda *_: None", patience_s=10)
    assert said == (" ".join([str(-number)] * 20), "")


@pytest.mark.slow
def test_a_node_of_a_command_that_ignores_ctrl_c_ignores_it(tmp_path: Path) -> None:
    assert _run(tmp_path, 2, to_all=True, handler="signal.SIG_IGN", patience_s=1) == ("None", "")
