"""Limits by control groups on a real process: they bind, and nothing is left of them. For root on cgroup version 1."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.launcher.agent import worker_limits
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(
    not all(os.access(worker_limits.ROOT / each / "cgroup.procs", os.W_OK) for each in ("cpu", "memory")),
    reason="no cgroup version 1 that this user may change",
)
BUSY = "import time\nprint(flush=True)\nwhile True: pass"
GREEDY = "input()\nheld = []\nwhile True: held.append(bytearray(1 << 20))"


def child(source: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[str]]:
    with child(BUSY) as process:
        yield process
        process.kill()


def used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_throttled_process_gets_no_more_than_its_share_until_that_ends(busy: subprocess.Popen[str]) -> None:
    assert busy.stdout is not None
    busy.stdout.readline()
    limited = worker_limits.throttled(busy.pid, f"elastrain-test-{busy.pid}", 0.1)
    before_s, began_s = used_s(busy.pid), time.monotonic()
    time.sleep(1.0)
    share = (used_s(busy.pid) - before_s) / (time.monotonic() - began_s)
    limited.end()
    assert share < 0.2  # a busy machine gives it less, none gives it more
    assert f"elastrain-test-{busy.pid}" not in Path(f"/proc/{busy.pid}/cgroup").read_text()
    assert not list(worker_limits.ROOT.glob(f"cpu/**/elastrain-test-{busy.pid}"))


def test_a_process_that_wants_more_memory_than_it_may_have_is_killed() -> None:
    with child(GREEDY) as process:
        limited = worker_limits.out_of_memory(process.pid, f"elastrain-test-{process.pid}", 16)
        process.communicate("go\n", timeout=30)
        assert process.returncode == -9
        limited.end()
    assert not list(worker_limits.ROOT.glob(f"memory/**/elastrain-test-{process.pid}"))


OWNER = """
import os, subprocess, sys, time
from elastrain.launcher.agent import worker_limits
from tests.support.waiting import until
from elastrain.launcher.agent.guardian import Guardian
guardian = Guardian("AGENT", dict(os.environ))
worker = subprocess.Popen(["sleep", "100"], start_new_session=True)
guardian.watch(worker.pid)
limited = worker_limits.throttled(worker.pid, f"elastrain-test-{worker.pid}", 0.5)
guardian.remove_group(limited.path)
print(limited.path, flush=True)
time.sleep(100)
"""


def test_the_group_of_an_agent_that_is_killed_goes_with_those_in_it() -> None:
    with child(OWNER) as owner:
        assert owner.stdout is not None
        group = Path(owner.stdout.readline().strip())
        assert group.is_dir()
        owner.kill()
    until(lambda: not group.exists(), 30, f"end of {group}")


def test_what_the_kernel_does_not_have_is_said() -> None:
    with pytest.raises(OSError, match="no tides controller"):
        worker_limits.Limited("tides", os.getpid(), "elastrain-test")
