"""`kill -9` of the launcher: within seconds no process of the run is left, and no file that somebody has to remove."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elastrain.launcher.shared import operator_messages, rundir
from elastrain.launcher.shared.operator_messages import AskState
from elastrain.launcher.shared.rundir import RunDir
from tests.support import warm
from tests.support.processes import in_sessions
from tests.support.training import environment
from tests.support.waiting import until

TRAINS_AND_SAVES = """
import os, pathlib, sys, time
import torch, elastrain
torch.set_num_threads(1)
job = elastrain.init(seed=0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = elastrain.DataLoader(torch.randn(64, 4), global_batch_size=8, micro_batch_size=2)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for step in job.steps(loader, until=1000):
    for batch in step:
        step.backward(model(batch).square().mean())
    if step.number == 2:
        (pathlib.Path(sys.argv[1]) / os.environ["ELASTRAIN_MEMBER"]).touch()
        time.sleep(600)  # a long checkpoint, say: the worker hears nothing
"""
STARTS = """
import os, pathlib, sys, time
(pathlib.Path(sys.argv[1]) / os.environ["ELASTRAIN_MEMBER"]).touch()
time.sleep(600)  # a long import, say: it has not met elastrain yet
"""
MARK = "TEST_OF_A_KILLED_LAUNCHER"
WITHIN_S = 15.0


class _Killed:
    """An `elastrain run` all of whose processes bear the name of its folder in their environment."""

    def __init__(self, tmp_path: Path, *options: str, popen: type[subprocess.Popen[bytes]]) -> None:
        self.folder = tmp_path
        self.run = RunDir(path=tmp_path / "run")
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        self._mark = f"{MARK}={tmp_path}".encode()
        command = [sys.executable, "-m", "elastrain.launcher", "run", "--run-dir", str(self.run.path), *options]
        with (tmp_path / "output").open("wb") as output:
            self.process = popen(
                command,
                env=environment(**{MARK: str(tmp_path), "TMPDIR": str(self.temporary)}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def wait_for_files(self, folder: Path, pattern: str, count: int) -> None:
        def made() -> bool:
            assert self.process.poll() is None, self.text()
            return len(list(folder.glob(pattern))) >= count

        until(made, 90, f"{count} of {pattern}: {self.text()}")

    def living(self) -> dict[int, str]:
        """Process id -> command line."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (process / "environ").read_bytes().split(b"\0"):
                    found[int(process.name)] = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:150]
            except OSError:  # it has just ended
                continue
        return found

    def event(self, event: str, **fields: str) -> dict[str, Any]:
        """The last one of this kind."""
        events = [json.loads(line) for line in self.run.events.read_text().splitlines()]
        wanted = fields | {"event": event}
        return next(e for e in reversed(events) if all(e.get(name) == value for name, value in wanted.items()))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def assert_nothing_left(self) -> None:
        until(lambda: not self.living(), WITHIN_S, f"end of {self.living()}")
        names = {path.name for path in self.run.path.rglob("*")}
        assert not names & {"control.sock", "secret", "etcd"}, names
        caches = {path for path in self.temporary.iterdir() if path.name.startswith("torchinductor")}  # torch's own
        assert not set(self.temporary.iterdir()) - caches
        assert f"elastrain/{operator_messages.state(self.run)['job']}/" not in Path("/proc/net/unix").read_text()


@contextmanager
def _run(*options: str, popen: type[subprocess.Popen[bytes]] = subprocess.Popen) -> Iterator[_Killed]:
    """Each kind of job starts cold in one test at least: who is whose child, and what clears up, is about the start."""
    # Sockets have short names.
    with tempfile.TemporaryDirectory(prefix="elastrain-test-") as folder:
        run = _Killed(Path(folder), *options, popen=popen)
        try:
            yield run
        finally:
            if run.process.poll() is None:
                run.kill()
            for pid in run.living():
                os.kill(pid, signal.SIGKILL)


def _script(tmp_path: Path, text: str = TRAINS_AND_SAVES) -> str:
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


@pytest.mark.slow
@pytest.mark.parametrize("where", [("--nproc-per-node", "2"), ("--local-nodes", "2")], ids=["one node", "local nodes"])
def test_workers_in_user_code_end_with_their_launcher(tmp_path: Path, where: tuple[str, ...]) -> None:
    with _run(*where, _script(tmp_path), str(tmp_path)) as run:
        run.wait_for_files(tmp_path, "m[0-9]", 2)
        assert len(run.living()) >= 5, "launcher, workers, loaders at least"
        run.kill()
        run.assert_nothing_left()


def test_plain_scripts_and_what_they_started_end_with_their_launcher(tmp_path: Path) -> None:
    script = tmp_path / "plain.sh"
    script.write_text(f"#!/bin/sh\nsetsid sleep 600 &\nenv -i sleep 600 &\ntouch {tmp_path}/there-$RANK\nsleep 600\n")
    script.chmod(0o700)
    with _run("--nproc-per-node", "2", "--no-python", str(script)) as run:
        run.wait_for_files(tmp_path, "there-*", 2)
        workers = {pid for pid in run.living() if os.getsid(pid) == pid} - {run.process.pid}
        assert len(in_sessions(workers)) >= 6, "two shells and two sleeps of each"
        run.kill()
        run.assert_nothing_left()
        until(lambda: not in_sessions(workers), WITHIN_S, "end of who has cleared its environment")


@pytest.mark.slow
def test_workers_in_user_code_end_with_their_agent_and_the_node_comes_back(tmp_path: Path) -> None:
    with _run("--local-nodes", "2", _script(tmp_path), str(tmp_path), popen=warm.Popen) as run:
        run.wait_for_files(tmp_path, "m[0-9]", 2)
        agent, worker = (run.event(event, source="agent:node1")["pid"] for event in ("start", "worker_start"))
        os.kill(agent, signal.SIGKILL)
        until(lambda: worker not in run.living(), WITHIN_S, "end of the killed agent's worker")
        until(lambda: _is_there(run, "node1", beside=agent), 60, f"node1 again: {run.text()}")
        # What cleared up after the former agent has not taken its successor for it.
        run.wait_for_files(run.run.path / "nodes" / "node1", "control.sock", 1)
        assert {"node0", "node1"} == {node.path.name for node in rundir.nodes_of(run.run) if node.control.exists()}
        run.kill()
        run.assert_nothing_left()


def _is_there(run: _Killed, node: str, *, beside: int) -> bool:
    answer = operator_messages._ask(rundir.of_node(run.run, node), AskState())
    return answer is not None and run.event("start", source=f"agent:{node}")["pid"] != beside


@pytest.mark.slow
def test_nodes_whose_fork_server_is_killed_end_with_a_sentence(tmp_path: Path) -> None:
    with _run("--local-nodes", "2", _script(tmp_path), str(tmp_path), popen=warm.Popen) as run:
        run.wait_for_files(tmp_path, "m[0-9]", 2)
        agent = run.event("start", source="agent:node1")["pid"]
        fork_server = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
        assert fork_server != run.process.pid
        os.kill(fork_server, signal.SIGKILL)
        assert run.process.wait(180) == 1, run.text()
        assert run.text().count("the process that nodes are started from was killed: all nodes end") == 1
        run.assert_nothing_left()


@pytest.mark.slow
def test_nothing_of_a_job_of_simulated_nodes_outlives_its_command(tmp_path: Path) -> None:
    """The process that nodes are forked from has torch in it: the end of its interpreter took a second."""
    with _run("--local-nodes", "2", "--no-python", "true") as run:
        assert run.process.wait(270) == 0, run.text()
        left = {pid: words for pid, words in run.living().items() if "resource_tracker" not in words}
        assert not left


def _guardian(run: _Killed) -> int:
    """The process that clears up after the launcher. It bears no mark itself.

    A new one can be told from others only once the kernel has laid its program out, shortly after it was started.
    """
    return until(partial(_guardian_now, run), WITHIN_S, "a guardian")


def _guardian_now(run: _Killed) -> int | None:
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    for pid in children:
        with suppress(OSError):  # it has just ended
            if "guardian.py" in Path(f"/proc/{pid}/cmdline").read_text():
                return int(pid)
    return None


def _has_replaced(run: _Killed, count: int) -> bool:
    """Whether so many guardians were replaced."""
    events = [json.loads(line) for line in run.run.events.read_text().splitlines()]
    return len([each for each in events if each["event"] == "guardian"]) == count


def test_a_guardian_that_is_killed_has_a_successor_that_knows_as_much(tmp_path: Path) -> None:
    script = tmp_path / "plain.sh"
    script.write_text(f"#!/bin/sh\nenv -i sleep 600 &\ntouch {tmp_path}/there-$RANK\nsleep 600\n")
    script.chmod(0o700)
    with _run("--nproc-per-node", "2", "--no-python", str(script)) as run:
        run.wait_for_files(tmp_path, "there-*", 2)
        workers = {pid for pid in run.living() if os.getsid(pid) == pid} - {run.process.pid}
        for count in (1, 2):
            os.kill(_guardian(run), signal.SIGKILL)
            until(partial(_has_replaced, run, count), WITHIN_S, "another guardian that knows everything")
        run.kill()
        run.assert_nothing_left()
        until(lambda: not in_sessions(workers), WITHIN_S, "end of who has cleared its environment")


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAINS_AND_SAVES, STARTS], ids=["training", "starting"])
def test_stopped_workers_end_with_their_agent_though_its_guardian_is_killed_beside_it(
    tmp_path: Path, script: str
) -> None:
    popen = warm.Popen if script == TRAINS_AND_SAVES else subprocess.Popen
    with _run("--nproc-per-node", "2", _script(tmp_path, script), str(tmp_path), popen=popen) as run:
        run.wait_for_files(tmp_path, "m[0-9]", 2)
        guardian = _guardian(run)
        os.kill(run.process.pid, signal.SIGSTOP)  # it cannot replace what is killed before it
        for pid in run.living().keys() - {run.process.pid}:
            os.kill(pid, signal.SIGSTOP)
        os.kill(guardian, signal.SIGKILL)
        run.kill()
        until(lambda: not run.living(), WITHIN_S, f"end of {run.living()}")
