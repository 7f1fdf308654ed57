"""A simulated node that has been started hears what it is told."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from elastrain.launcher.node_starts import begin


@pytest.mark.slow
def test_ctrl_c_right_after_a_node_was_started_is_not_lost() -> None:
    """A fork of the fork server ignores it at first: ten of twenty went on, and the command with them."""
    forks = multiprocessing.get_context("forkserver")
    for _ in range(20):
        process = forks.Process(target=time.sleep, args=(30,))
        begin(process)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        process.join(10)
        went_on = process.exitcode is None
        process.kill()
        assert not went_on
