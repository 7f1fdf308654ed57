"""Real agents and stub workers that lose everything: the next life begins by itself, or the end says why not."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from elastrain.launcher.checkpoints import newest_step
from elastrain.launcher.lives import BARREN_MAX
from elastrain.snapshot.durable.places.opening import place_at
from tests.support import warm
from tests.support.checkpoints import save
from tests.support.launcher_harness import STUB
from tests.support.nodes_harness import ELASTRAIN, NodesJob
from tests.support.processes import in_sessions, kill_group
from tests.support.training import assert_equal_to_undisturbed, environment
from tests.support.waiting import until

WITHIN_S = 10.0


class Lives:
    """A job with a checkpoint of step 7, unless `steps` says otherwise."""

    def __init__(self, tmp_path: Path, *args: str, nodes: int = 1, workers: int = 2, steps: tuple[int, ...] = (7,)):
        self.finish, self.output, self.run = tmp_path / "finish", tmp_path / "output", tmp_path / "run"
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        for step in steps:
            save(place_at(str(folder)), step)
        size = ["--nproc-per-node", str(workers), *(["--local-nodes", str(nodes)] if nodes > 1 else [])]
        command = [*ELASTRAIN, "run", *size, "--checkpoint-dir", str(folder), "--run-dir", str(self.run), str(STUB)]
        with self.output.open("wb") as file:
            self.process = warm.Popen(
                [*command, "--finish", str(self.finish), *args],
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Lives:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            for pid in self.sessions():
                kill_group(pid)
            self.process.kill()
            self.process.wait(10)

    def events(self, event: str = "", **fields: Any) -> list[dict[str, Any]]:
        file = self.run / "events.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("\n")]
        wanted = fields | ({"event": event} if event else {})
        return [e for e in events if all(e.get(name) == value for name, value in wanted.items())]

    def wait(self, event: str, count: int = 1, after: str = "m", **fields: Any) -> list[dict[str, Any]]:
        """`after`: in views, members with later numbers only."""

        def found() -> list[dict[str, Any]]:
            first = int(after[1:] or -1)
            events = [e for e in self.events(event, **fields) if all(int(m[1:]) > first for m in e.get("members", ()))]
            return events if len(events) >= count else []

        try:
            return until(found, 60, f"{event} {fields}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text() if self.output.exists() else "(no output)"

    def exit_code(self) -> int:
        code = self.process.wait(60)
        sessions = set(self.sessions())
        until(lambda: not in_sessions(sessions), 40, f"end of {in_sessions(sessions)}")
        return code

    def sessions(self) -> list[int]:
        """Leaders of all process groups of the job: agents and workers."""
        return [e["pid"] for e in self.events() if e["event"] in ("start", "worker_start")]

    def kill(self, *members: str) -> float:
        for member in members:
            os.kill(self.wait("worker_start", member=member)[0]["pid"], signal.SIGKILL)
        return time.monotonic()


def test_a_job_that_has_lost_its_state_goes_on_from_its_checkpoint_with_new_members(tmp_path: Path) -> None:
    with Lives(tmp_path, "--lose-state-below-life", "2") as job:
        job.wait("view", members=["m2", "m3"])
        job.finish.touch()
        assert job.exit_code() == 0, job.text()
        [life] = job.events("life")
        assert (life["number"], life["step"]) == (2, 7)
        assert "all holders of shard 0 are gone. life 2 goes on from the checkpoint of step 7" in job.text()
        assert not (tmp_path / "run" / "secret").exists()


def test_lives_that_come_no_further_have_an_end_with_a_sentence(tmp_path: Path) -> None:
    with Lives(tmp_path, "--lose-state-below-life", "99") as job:
        assert job.exit_code() == 1
        assert len(job.events("life")) == BARREN_MAX
        assert "came no further than the checkpoint of step 7: look at what ended them" in job.text()


def test_without_a_complete_checkpoint_the_job_ends_and_says_so(tmp_path: Path) -> None:
    with Lives(tmp_path, "--lose-state-below-life", "99", steps=()) as job:
        assert job.exit_code() == 1
        assert "there is no complete checkpoint to go back to yet" in job.text()


def test_nodes_agree_upon_the_next_life_when_their_workers_are_killed_at_once(tmp_path: Path) -> None:
    with Lives(tmp_path, nodes=3, workers=1) as job:
        job.wait("view", count=3, generation=1)
        job.wait("note", count=3, kind="saw_view")
        time.sleep(0.2)  # a few steps are committed
        killed_s = job.kill("m0", "m1", "m2")
        views = job.wait("view", count=3, after="m2", generation=1)
        assert max(view["t"] for view in views) - killed_s < WITHIN_S, job.text()
        job.finish.touch()
        assert job.exit_code() == 0, job.text()
        assert {start["life"] for start in job.events("start") if "life" in start} == {2}


def test_a_job_all_of_whose_nodes_are_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with Lives(tmp_path, nodes=2, workers=1) as job:
        job.wait("view", count=2, generation=1)
        job.wait("note", count=2, kind="saw_view")
        killed_s = time.monotonic()
        for pid in job.sessions():
            kill_group(pid)
        views = job.wait("view", count=2, after="m1", generation=1)
        assert max(view["t"] for view in views) - killed_s < WITHIN_S, job.text()
        job.finish.touch()
        assert job.exit_code() == 0, job.text()
        assert (
            "every node was lost, and with them the state. life 2 goes on from the checkpoint of step 7" in job.text()
        )


# ---- real training


@pytest.mark.parametrize(
    ("options", "members", "strike"),
    [
        (("--nproc-per-node", "2"), 2, ("worker_start",)),
        (("--local-nodes", "3"), 3, ("worker_start",)),
        (("--local-nodes", "2"), 2, ("worker_start", "start")),
    ],
    ids=["all workers of one node", "all workers of three nodes", "all nodes"],
)
def test_all_is_killed_and_the_job_goes_on_from_its_own_checkpoint_bit_for_bit(
    tmp_path: Path, options: tuple[str, ...], members: int, strike: tuple[str, ...]
) -> None:
    folder, arguments = tmp_path / "checkpoints", ("--steps", "14")
    writes = ("--checkpoint-dir", str(folder), "--checkpoint-every", "2")
    with NodesJob(tmp_path, *options, *writes, arguments=arguments) as job:
        until(lambda: (newest_step(str(folder)) or 0) >= 3, 90, f"a checkpoint\n{job.text()}")
        killed_s = time.monotonic()
        for pid in [e["pid"] for e in job.events() if e["event"] in strike]:
            kill_group(pid)
        replacement = job.wait("worker_start", member=f"m{members}")
        begins = job.wait("start", life=2)
        assert begins["step"] >= 3, job.text()
        assert max(begins["t"], replacement["t"]) - killed_s < WITHIN_S, job.text()
        assert_equal_to_undisturbed(job.finish(), *arguments)
        job.assert_nothing_left()
