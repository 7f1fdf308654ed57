"""`elastrain top` in a real terminal of 80×24 that tmux plays, beside a real job that loses a member."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator

import pytest

from tests.support.nodes_harness import NodesJob, stub_job

pytest.importorskip("textual", reason="the extra `watch` is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Terminal:
    """A terminal of 80×24 in a tmux server of its own."""

    def __init__(self, command: list[str]) -> None:
        self._server = ["tmux", "-L", f"elastrain-test-{uuid.uuid4().hex[:8]}", "-f", "/dev/null"]
        told = f"{shlex.join(command)}; echo ended with $?; sleep 100"
        self._tmux("new-session", "-d", "-x", "80", "-y", "24", "-s", "top", "sh", "-c", told)

    def _tmux(self, *words: str) -> str:
        return subprocess.run([*self._server, *words], capture_output=True, text=True, timeout=180).stdout

    @property
    def shown(self) -> str:
        return self._tmux("capture-pane", "-p", "-t", "top")

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", "-t", "top", *keys)

    def until(self, words: str, within_s: float = 90.0) -> str:
        end_s = time.monotonic() + within_s
        while words not in (shown := self.shown):
            assert time.monotonic() < end_s, f"{words!r} never came:\n{shown}"
            time.sleep(0.1)
        return shown

    def close(self) -> None:
        self._tmux("kill-server")


@pytest.fixture
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodesJob]:
    with stub_job(tmp_path_factory.mktemp("run"), "--standalone", "--nproc-per-node", "2") as job:
        yield job


def top(job: NodesJob, *options: str) -> list[str]:
    return [sys.executable, "-m", "elastrain.launcher", "top", str(job.run.path), "--every", "0.2", *options]


def test_a_loss_is_seen_on_the_screen_and_the_journal_opens(job: NodesJob) -> None:
    job.wait_step(2)
    terminal = Terminal(top(job))
    try:
        shown = terminal.until("q Quit")
        terminal.until("m1")
        assert "rank" in shown and "s/micro-batch" in shown and "memory" in shown
        job.kill("m1")
        shown = terminal.until("m1 lost")
        assert "ago: generation 2: m1 lost" in shown
        terminal.press("p")
        terminal.until("[PAUSED]")
        terminal.press("p", "s")
        terminal.until("by node")
        terminal.press("j")
        terminal.until("journal of m0")
        terminal.press("Escape")
        terminal.until("by node")
        terminal.press("q")
        terminal.until("ended with 0")
    finally:
        terminal.close()
    assert job.finish().exit_code == 0


def test_lines_are_printed_where_they_are_asked_for_and_end_with_the_run(job: NodesJob) -> None:
    job.wait_step(2)
    terminal = Terminal(top(job, "--lines"))
    try:
        terminal.until("run folder")
        assert job.finish().exit_code == 0
        terminal.until("ended with 0")
    finally:
        terminal.close()
