"""The wall clock jumps forth and back under a job of three nodes: nothing that it decides rests on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.nodes_harness import NodesJob
from tests.support.training import assert_equal_to_undisturbed

SOURCE = Path(__file__).parents[2] / "support" / "jumping_clock.c"
COMPILER = shutil.which("cc") or ""
ARGUMENTS = ("--steps", "28", "--backups", "1")
DAY_S = 86_400

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not COMPILER, reason="there is no C compiler")]


class _Clock:
    """The wall clock of all processes that are started behind `inside`."""

    def __init__(self, folder: Path) -> None:
        self._offset, self._library = folder / "offset", folder / "jumping_clock.so"
        self.jump(0)
        subprocess.run([COMPILER, "-shared", "-fPIC", "-O1", "-o", self._library, SOURCE, "-ldl"], check=True)
        told = {"LD_PRELOAD": str(self._library), "CLOCK_OFFSET": str(self._offset)}
        self._environment = {**os.environ, **told}
        self.inside = warm.in_other_surroundings(**told)

    def jump(self, to_s: int) -> None:
        """So far from the true time, at once: the file is mapped where it is read."""
        with self._offset.open("r+b" if self._offset.exists() else "wb") as file:
            file.write(to_s.to_bytes(8, "little", signed=True))

    def now_s(self) -> float:
        """As a process that starts now sees it."""
        shows = [sys.executable, "-c", "import time; print(time.time())"]
        return float(subprocess.run(shows, env=self._environment, capture_output=True, check=True).stdout)

    def is_read_by(self, pid: int) -> bool:
        maps = Path(f"/proc/{pid}/maps").read_text()
        return all(name in maps for name in (self._library.name, self._offset.name))


@pytest.fixture
def clock(tmp_path: Path) -> _Clock:
    made = _Clock(tmp_path)
    made.jump(DAY_S)
    assert abs(made.now_s() - time.time() - DAY_S) < 60
    made.jump(0)
    return made


def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, clock: _Clock) -> None:
    """Before each loss it jumps. By it, leases and checkpoints would be too old at once, or never be."""
    durable = ("--checkpoint-dir", str(tmp_path / "places"), "--checkpoint-every", "2", "--keep-for", "1h")
    options = ("--local-nodes", "3", "--inject", *durable)
    with NodesJob(tmp_path, *options, arguments=ARGUMENTS, inside=clock.inside) as job:
        job.wait_step(3)
        generation = 1
        for days, target in ((400, "member:m1"), (-400, "node:node2")):
            clock.jump(days * DAY_S)
            job.wait_copied()
            job.inject(f"kill --target {target}")
            generation = job.wait_members("node0", "node1", "node2", after=generation)
        living = [pid for pid in job.sessions() if Path(f"/proc/{pid}").exists()]
        assert len(living) >= 6 and all(map(clock.is_read_by, living))  # three agents, and a worker of each
        run = job.finish()
        assert_equal_to_undisturbed(run, *ARGUMENTS)
        job.assert_nothing_left()
