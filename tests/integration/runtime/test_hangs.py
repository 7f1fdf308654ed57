"""Real workers stand still in every way there is; they are ended and replaced, the healthy are not; no bit differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes_harness import NodesJob
from tests.support.training import SCRIPTS, Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
PHASES = SCRIPTS / "phase_training.py"


def ended(run: Run) -> list[str]:
    """Members that were ended for hanging."""
    return [e["member"] for e in run.events if e["event"] == "kill" and "because it hangs" in e["reason"]]


def hang(run: Run, member: str) -> dict[str, Any]:
    return next(e for e in run.events if e["event"] == "hang" and e["member"] == member)


def test_a_held_lock_a_loop_and_a_stopped_process_are_each_found_and_replaced(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "all")
    faults = (
        "hang --target member:m1 --at step=6,phase=backward --how lock",
        "hang --target member:m2 --at step=9,phase=forward --how loop",
        "stop --target member:m3 --at step=13,phase=reduce",
    )
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults, slow_until="m6")
    assert_equal_to_undisturbed(run, *arguments)
    assert ended(run) == ["m1", "m2", "m3"]
    assert "m1 hangs: no sign of life" in run.output
    # Members' last operations are in the log; m0 has nothing left to do but to hear of the others.
    told = next(e for e in run.events if e["event"] == "stacks")["members"]
    assert "its engine's last operation" in told["m0"] and "its loop is waiting" in told["m0"]
    assert "runs, such as" in hang(run, "m1")["waits_for"]["m0"], "m1 stood in a backward"
    # What holds the interpreter still shows what it was at; who is stopped cannot, and the kernel's word stands there.
    assert "in _hang" in (run.folder / "stacks/m1.txt").read_text()
    assert "in _hang" in (run.folder / "stacks/m2.txt").read_text()
    assert "state T" in (run.folder / "stacks/m3.txt").read_text()
    assert "next_work" in (run.folder / "stacks/m0.txt").read_text()


def test_a_hang_on_a_node_with_one_worker_is_found_by_what_the_other_agents_tell(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "1")
    with NodesJob(tmp_path, "--local-nodes", "3", "--inject", arguments=arguments) as job:
        job.wait_step(6)
        job.inject("hang --target member:m1 --at phase=forward --how forward")
        job.wait("hang", member="m1")
        job.wait("view", generation=3)
        run = job.finish()
    assert_equal_to_undisturbed(run, *arguments)
    assert ended(run) == ["m1"]
    assert {path.stem for path in (run.folder / "stacks").iterdir()} >= {"m0", "m1", "m2"}
    assert "m1 hangs" in (run.folder / "stacks/m2.txt").read_text()


def test_declared_phases_are_waited_for_as_long_as_they_say_and_no_longer(tmp_path: Path) -> None:
    arguments = ("--steps", "40")
    stalls = ("--step-s", "0.1", "--evaluates", "m0:4", "--saves", "m1:8", "--stuck", "m2:349")
    run = run_job(tmp_path, workers=3, arguments=(*arguments, *stalls), script=PHASES)
    assert_equal_to_undisturbed(run, *arguments, script=PHASES)
    assert ended(run) == ["m1", "m2"]
    assert hang(run, "m1")["where"] == "in checkpoint"
    assert hang(run, "m2")["where"] == "in data"
    assert "in main" in (run.folder / "stacks/m1.txt").read_text()


def test_who_never_comes_to_a_collective_of_the_script_is_told_from_who_waits_in_it(tmp_path: Path) -> None:
    """Both stand alike for their agent, and are ended; what the group did last says to a person who was missing."""
    arguments = ("--steps", "20")
    run = run_job(tmp_path, workers=3, arguments=(*arguments, "--skips", "m1:4"), script=PHASES)
    assert_equal_to_undisturbed(run, *arguments, script=PHASES)
    assert sorted(ended(run)) == ["m0", "m1"]
    told = next(e for e in run.events if e["event"] == "stacks")["members"]
    assert "the last call (5) of its group" in told["m0"] and "all_reduce" in told["m0"] and "under way" in told["m0"]
    assert "the last call (4) of its group" in told["m1"] and "under way" not in told["m1"]
    assert "group 'world' was barrier" in told["m2"]


@pytest.mark.on_demand
def test_a_node_that_was_stopped_beyond_its_lease_comes_back_and_nothing_that_it_writes_is_read(tmp_path: Path) -> None:
    arguments = ("--steps", "60", "--backups", "1")
    with NodesJob(tmp_path, "--local-nodes", "3", "--inject", arguments=arguments) as job:
        job.wait_step(3)
        job.inject("stop --target node:node2 --for 8")
        # Stopped in the middle of a step, its worker has sent a part of it; woken, it goes on where it was.
        generation = job.wait_members("node0", "node1", after=1)
        job.wait_members("node0", "node1", "node2", after=generation)
        run = job.finish()
        assert_equal_to_undisturbed(run, *arguments)
        assert "m2" not in run.digests, "who comes back is another member"
        assert len(run.digests) == 3
        assert ended(run) == [], "the agent that slept blames nobody for the time that it missed"
        job.assert_nothing_left()


@pytest.mark.on_demand
def test_a_straggler_gets_fewer_runs_then_another_takes_its_place(tmp_path: Path) -> None:
    arguments = ("--steps", "500")
    faults = ("slow --target member:m1 --at step=20,phase=forward --factor 4 --how sleep",)
    run = run_job(tmp_path, workers=3, arguments=(*arguments, "--step-s", "0.05"), script=PHASES, faults=faults)
    assert_equal_to_undisturbed(run, *arguments, script=PHASES)
    shares = next(e for e in run.events if e["event"] == "shares")
    assert "by their speeds: m1 2" in shares["reason"], "by what it was slowed, a quarter of the median member's speed"
    ends = [e for e in run.events if e["event"] == "kill"]
    assert [e["member"] for e in ends] == ["m1"] and "it is ended, and replaced" in ends[0]["reason"]
    assert ends[0]["t"] > shares["t"] + 10, "no run was left for it"
    assert "shares of the runs by their speeds" in run.output
    assert "m3" in run.digests


@pytest.mark.parametrize("options", [(), ("--memory-limit", "64G")], ids=["", "with a memory limit"])
def test_a_member_at_half_speed_gets_half_as_many_runs_and_a_noisy_step_moves_none(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    arguments = ("--steps", "45")
    faults = (
        "slow --target member:m2 --at step=8,phase=forward --factor 8 --how sleep --for 0.5",
        "slow --target member:m1 --at step=22,phase=forward --factor 2 --how sleep",
    )
    told = (*arguments, "--step-s", "0.05")
    run = run_job(tmp_path, workers=3, arguments=told, script=PHASES, faults=faults, options=options)
    assert_equal_to_undisturbed(run, *arguments, script=PHASES)
    shares = [e for e in run.journals["m0"] if e["event"] == "shares"]
    assert shares[0]["step"] >= 22, "the noisy step changes nothing"
    assert set(shares[-1]["speeds"]) == {"m1"} and 40 <= shares[-1]["speeds"]["m1"] <= 65
    runs = [e["run"] for e in run.journals["m1"] if e["event"] == "micro_batch" and e["step"] in (5, 44)]
    assert len(runs) == 2 + 1, "two of six runs, then one"


def test_a_preempted_node_hands_over_between_two_steps_and_leaves(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "1")
    with NodesJob(tmp_path, "--local-nodes", "3", "--inject", arguments=arguments) as job:
        job.wait_step(3)
        job.inject("preempt --target node:node1 --grace 30")
        job.wait("leaving", source="agent:node1")
        job.wait("end", source="agent:node1", exit_code=143)
        job.wait("view", generation=2)
        run = job.finish()
        job.assert_nothing_left()
    # The others have ended the job well: that a node was told to go does not count.
    assert run.exit_code == 0
    assert_equal_to_undisturbed(run, *arguments)
    assert "m1 hand over at the end of a step" in run.output
    last = max(e["step"] for e in run.journals["m1"] if e["event"] == "advance")
    begun = [e for e in run.journals["m1"] if e["event"] == "micro_batch" and e["step"] > last]
    assert not begun, "it leaves before it has begun with the next step"


@pytest.mark.on_demand
def test_a_preempted_node_hands_over_to_who_is_only_on_the_way(tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.touch()
    arguments = ("--steps", "60", "--backups", "1")
    nodes = ("--local-nodes", "2", "--inject", "--shutdown-timeout", "100")
    with NodesJob(tmp_path, *nodes, arguments=(*arguments, "--slow-while", str(slow))) as job:
        job.wait_step(3)
        job.inject("kill --target member:m1")
        job.wait("view", generation=2)
        job.inject("preempt --target node:node0 --grace 120")
        job.wait("end", source="agent:node0", exit_code=143)
        slow.unlink()
        run = job.finish()
        job.assert_nothing_left()
    assert run.exit_code == 0
    assert_equal_to_undisturbed(run, *arguments)
