"""`--standby`: a waiting worker, with its libraries imported, takes the place of a killed one. The bits stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.nodes_harness import NodesJob
from tests.support.processes import in_sessions
from tests.support.training import SCRIPT, environment, undisturbed
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ARGUMENTS = ("--steps", "40", "--backups", "1")


def waiting(job: NodesJob) -> list[int]:
    """Processes of the job's waiting workers."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue
        if any(word.endswith(b"standby_worker.py") for word in words) and parent == job.process.pid:
            found.append(int(path.parent.name))
    return found


def replaced(job: NodesJob, member: str, *, standby: bool) -> str:
    """Kill a member, and wait until another one is in the view in its place. Returns its id."""
    job.wait_copied()
    known = {event["member"] for event in job.events("worker_start")}
    job.kill(member)

    def started() -> list[dict[str, object]]:
        return [event for event in job.events("worker_start") if event["member"] not in known]

    event = until(started, 90, f"a worker for {member}\n{job.text()}")[0]
    assert event.get("standby", False) is standby
    found = str(event["member"])
    until(lambda: found in job.events("view")[-1]["members"], 90, f"{found} in the view\n{job.text()}")
    return found


def test_lost_workers_are_replaced_by_waiting_ones_and_the_bits_stay(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--standby")
    with NodesJob(tmp_path, *options, arguments=ARGUMENTS) as job:
        job.wait_step(2)
        first = until(lambda: waiting(job), 60, "a waiting worker")
        assert len(first) == 1, "one per node"
        member = replaced(job, "m0", standby=True)
        assert job.pid(member) == first[0]
        second = until(lambda: [pid for pid in waiting(job) if pid not in first], 60, "the next waiting worker")
        member = replaced(job, member, standby=True)
        assert job.pid(member) == second[0]
        run = job.finish(120)
        assert run.exit_code == 0, run.output
        assert set(run.digests.values()) == set(undisturbed(*ARGUMENTS).digests.values())
        job.assert_nothing_left()
        assert not in_sessions({*first, *second}) and not waiting(job)


def test_a_killed_waiting_worker_costs_nothing_but_time(tmp_path: Path) -> None:
    with NodesJob(tmp_path, "--nproc-per-node", "2", "--standby", arguments=ARGUMENTS) as job:
        job.wait_step(2)
        os.kill(until(lambda: waiting(job), 60, "a waiting worker")[0], signal.SIGKILL)
        until(lambda: not waiting(job), 60, "its end")
        replaced(job, "m1", standby=False)
        assert until(lambda: waiting(job), 60, "the next waiting worker")
        run = job.finish(120)
        assert run.exit_code == 0, run.output
        assert set(run.digests.values()) == set(undisturbed(*ARGUMENTS).digests.values())


def test_a_killed_launcher_takes_the_waiting_worker_along(tmp_path: Path) -> None:
    with NodesJob(tmp_path, "--nproc-per-node", "1", "--standby", arguments=ARGUMENTS) as job:
        job.wait_step(1)
        pid = until(lambda: waiting(job), 60, "a waiting worker")[0]
        job.process.kill()
        until(lambda: not Path(f"/proc/{pid}/exe").exists(), 60, "the end of the waiting worker")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--no-python",), "--standby imports the libraries of a Python script"),
        (("--redirects", "3"), "--standby leaves the output of workers on the screen"),
        (("--tee", "1"), "--standby leaves the output of workers on the screen"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(
    tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    target = "true" if words == ("--no-python",) else str(SCRIPT)
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--standby", *words]
    command += ["--run-dir", str(tmp_path / "run"), target]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 2 and sentence in done.stderr, done.stderr
    assert not (tmp_path / "run").exists()
