"""Real agents and stub workers that lose everything: the next life begins by itself, or the end says why not."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elastrain.launcher.start.restarts import BARREN_MAX
from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import visible
from elastrain.snapshot.durable.reading import Checkpoint
from tests.support.checkpoints import save
from tests.support.nodes_harness import NodesJob, stub_job
from tests.support.processes import in_sessions, kill_group
from tests.support.training import SCRIPTS, assert_equal_to_undisturbed, run_job
from tests.support.waiting import until

WITHIN_S = 10.0


def job_with_checkpoint(
    tmp_path: Path, *arguments: str, nodes: int = 1, workers: int = 2, steps: tuple[int, ...] = (7,)
) -> NodesJob:
    """Of stub workers, with a checkpoint of step 7 unless `steps` says otherwise."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for step in steps:
        save(place_at(str(folder)), step)
    size = ("--nproc-per-node", str(workers), *(("--local-nodes", str(nodes)) if nodes > 1 else ()))
    return stub_job(tmp_path, *size, "--checkpoint-dir", str(folder), arguments=arguments)


def end(job: NodesJob) -> int:
    """Its exit code, when all of its processes have ended."""
    run = job.end()
    sessions = set(job.sessions())
    until(lambda: not in_sessions(sessions), 40, f"end of {in_sessions(sessions)}")
    return run.exit_code


def next_views(job: NodesJob, count: int, *, after: int) -> list[dict[str, Any]]:
    """First views of all members with numbers above `after`, as so many agents tell."""

    def found() -> list[dict[str, Any]]:
        views = [e for e in job.events("view", generation=1) if all(int(m[1:]) > after for m in e["members"])]
        return views if len(views) >= count else []

    try:
        return until(found, 60, f"{count} views after m{after}")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{job.text()}") from None


def test_a_job_that_has_lost_its_state_goes_on_from_its_checkpoint_with_new_members(tmp_path: Path) -> None:
    with job_with_checkpoint(tmp_path, "--lose-state-below-life", "2") as job:
        job.wait("view", members=["m2", "m3"])
        job.hurry()
        assert end(job) == 0, job.text()
        [life] = job.events("life")
        assert (life["number"], life["step"]) == (2, 7)
        assert "all holders of shard 0 are gone. life 2 begins, and reads the checkpoint of step 7" in job.text()
        assert not (tmp_path / "run" / "secret").exists()


def test_lives_that_come_no_further_have_an_end_with_a_sentence(tmp_path: Path) -> None:
    with job_with_checkpoint(tmp_path, "--lose-state-below-life", "99") as job:
        assert end(job) == 1
        assert len(job.events("life")) == BARREN_MAX
        assert "came no further than the checkpoint of step 7: look at what ended them" in job.text()


def test_without_a_complete_checkpoint_the_job_ends_and_says_so(tmp_path: Path) -> None:
    with job_with_checkpoint(tmp_path, "--lose-state-below-life", "99", steps=()) as job:
        assert end(job) == 1
        assert "there is no complete checkpoint to go back to yet" in job.text()


def test_nodes_agree_upon_the_next_life_when_their_workers_are_killed_at_once(tmp_path: Path) -> None:
    with job_with_checkpoint(tmp_path, nodes=3, workers=1) as job:
        job.wait_all("view", count=3, generation=1)
        job.wait_all("note", count=3, kind="saw_view")
        time.sleep(0.2)  # a few steps are committed
        job.kill("m0", "m1", "m2")
        killed_s = time.monotonic()
        views = next_views(job, 3, after=2)
        assert max(view["t"] for view in views) - killed_s < WITHIN_S, job.text()
        job.hurry()
        assert end(job) == 0, job.text()
        assert {start["life"] for start in job.events("start") if "life" in start} == {2}


def test_a_node_that_cannot_begin_again_does_not_spoil_the_end_that_others_come_to(tmp_path: Path) -> None:
    """Its directory can be written no more, as on a full disk: the command ended with the code of that node."""
    with job_with_checkpoint(tmp_path, nodes=3, workers=1) as job:
        job.wait_all("view", count=3, generation=1)
        job.wait_all("note", count=3, kind="saw_view")
        (tmp_path / "checkpoints").rename(tmp_path / "elsewhere")
        (tmp_path / "checkpoints").touch()
        job.kill_node("node1")
        refused = f"node1: --checkpoint-dir {tmp_path}/checkpoints: no checkpoint can be written"
        until(lambda: refused in job.text(), 60, f"a refusal\n{job.text()}")
        job.hurry()
        assert end(job) == 0, job.text()
        assert "finished" in job.text().splitlines()[-1]


def test_a_job_all_of_whose_nodes_are_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    with job_with_checkpoint(tmp_path, nodes=2, workers=1) as job:
        job.wait_all("view", count=2, generation=1)
        job.wait_all("note", count=2, kind="saw_view")
        killed_s = time.monotonic()
        for pid in job.sessions():
            kill_group(pid)
        views = next_views(job, 2, after=1)
        assert max(view["t"] for view in views) - killed_s < WITHIN_S, job.text()
        job.hurry()
        assert end(job) == 0, job.text()
        assert (
            "every node was lost, and with them the state. life 2 begins, and reads the checkpoint of step 7"
            in job.text()
        )


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_job_that_was_told_to_stop_begins_no_other_life_when_it_loses_its_state_meanwhile(
    tmp_path: Path, nodes: int
) -> None:
    with job_with_checkpoint(tmp_path, nodes=nodes) as job:
        job.wait_all("view", count=nodes, generation=1)
        job.wait_step(1)
        job.process.send_signal(signal.SIGTERM)
        assert end(job) == 128 + signal.SIGTERM, job.text()
        assert not job.events("life")
        assert "stopped by SIGTERM; meanwhile the job has lost its state: all holders of shard 0 are gone" in job.text()


# ---- real training


@pytest.mark.parametrize(
    ("options", "members", "strike", "seen_in"),
    [
        (("--nproc-per-node", "2"), 2, ("worker_start",), ""),
        (("--local-nodes", "3"), 3, ("worker_start",), ""),
        (("--local-nodes", "2"), 2, ("worker_start", "start"), ""),
        pytest.param(
            ("--local-nodes", "3", "--checkpoint-layout", "local"),
            3,
            ("worker_start",),
            "node0",
            marks=pytest.mark.on_demand,
        ),
    ],
    ids=["all workers of one node", "all workers of three nodes", "all nodes", "from local disks"],
)
def test_all_is_killed_and_the_job_goes_on_from_its_own_checkpoint_bit_for_bit(
    tmp_path: Path, options: tuple[str, ...], members: int, strike: tuple[str, ...], seen_in: str
) -> None:
    folder, arguments = tmp_path / "checkpoints", ("--steps", "14")
    writes = ("--checkpoint-dir", str(folder), "--checkpoint-every", "2")
    seen = place_at(str(folder / seen_in))
    with NodesJob(tmp_path, *options, *writes, arguments=arguments) as job:
        until(
            lambda: any(name >= name_of(1, 3) for name in visible(seen)),
            90,
            f"a checkpoint\n{job.text()}",
        )
        killed_s = time.monotonic()
        for pid in [e["pid"] for e in job.events() if e["event"] in strike]:
            kill_group(pid)
        replacement = job.wait("worker_start", member=f"m{members}")
        begins = job.wait("start", life=2)
        assert begins["step"] >= 3, job.text()
        assert max(begins["t"], replacement["t"]) - killed_s < WITHIN_S, job.text()
        assert_equal_to_undisturbed(job.finish(), *arguments)
        job.assert_nothing_left()


def test_without_checkpoints_nodes_that_are_started_again_do_not_begin_anew_what_had_begun(tmp_path: Path) -> None:
    """The last node dies while the first one, which was lost before it, is on its way back: nobody has the state."""
    with NodesJob(tmp_path, "--local-nodes", "2", arguments=("--steps", "12")) as job:
        job.wait_step(2)
        job.kill_node("node0")
        until(lambda: "it is started again (1 of 10)" in job.text(), 30, f"a restart\n{job.text()}")
        job.kill_node("node1")
        assert end(job) == 1, job.text()
        assert "every node was lost, and with them the state" in job.text()
        assert not job.events("view", generation=1)[2:], job.text()
        job.assert_nothing_left()


@pytest.mark.on_demand
def test_members_that_differ_end_a_life_and_the_next_one_goes_on_bit_for_bit(tmp_path: Path) -> None:
    arguments = ("--steps", "14")
    options = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "2")
    script = SCRIPTS / "diverging_training.py"
    run = run_job(tmp_path, workers=2, arguments=(*arguments, "--slow", "0.1"), options=options, script=script)
    assert_equal_to_undisturbed(run, *arguments, script=SCRIPTS / "resumed_training.py")
    assert " with different " in run.output
    assert [event["number"] for event in run.events if event["event"] == "life"] == [2]


def test_a_state_that_changes_ends_a_life_and_the_next_one_goes_on_from_before_it(tmp_path: Path) -> None:
    """A bit of a state that nobody else has: no checkpoint of that step is complete, whatever was written of it."""
    arguments, place = ("--steps", "14", "--backups", "0", "--audit", "4"), tmp_path / "checkpoints"
    options = ("--checkpoint-dir", str(place), "--checkpoint-every", "1", "--keep", "20")
    faults = ["flip --target member:m0 --at step=7 --where moments"]
    run = run_job(tmp_path, workers=2, arguments=arguments, options=options, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert "has changed in its memory since it was told" in run.output
    [life] = [event for event in run.events if event["event"] == "life"]
    assert life["number"] == 2 and 0 <= life["step"] < 8
    ofs = [Checkpoint.open([place_at(str(place))], name) for name in visible(place_at(str(place)))]
    assert max(each.manifest.step for each in ofs if each.manifest.life == 1) == life["step"]
    assert [each.verify() for each in ofs] == [[]] * len(ofs)
