"""The launcher with real processes: views, deaths, restarts, refusals, ends. The workers are stubs without a model."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from elastrain.comm.errors import HandshakeRefused
from elastrain.comm.wire.handshake import dial
from elastrain.launcher.agent.worker_limits import WARM_UP_NICE
from elastrain.launcher.faults.table import NOT_ARMED
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.operator_messages import AskFault
from tests.support import warm
from tests.support.nodes_harness import NodesJob, stub_job
from tests.support.waiting import until


def launched(tmp_path: Path, *options: str, args: tuple[str, ...] = ()) -> NodesJob:
    return stub_job(tmp_path, "--standalone", *options, arguments=args)


def test_killed_member_leaves_the_view_at_once_and_comes_back_as_a_new_one(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "3") as job:
        assert job.wait_view(1) == ["m0", "m1", "m2"]
        job.wait_step(2)
        job.kill("m1")
        assert job.wait_view(2) == ["m0", "m2"]
        assert job.wait_view(3) == ["m0", "m2", "m3"]
        assert job.wait("death", member="m1")["detected_by"] in ("mutex", "pidfd")
        seen = until(lambda: job.events("note", kind="saw_view", generation=2), 40, "both survivors see the view")
        assert {e["members"][0] for e in seen} == {"m0"}
        state = job.status()
        assert (state["state"], state["generation"], state["restarts_left"]) == ("running", 3, 9)
        assert [(m["rank"], m["id"]) for m in state["members"]] == [(0, "m0"), (1, "m2"), (2, "m3")]
        assert job.finish().exit_code == 0
        job.assert_nothing_left()
    left = operator_messages.state(job.run)
    assert (left["state"], left["exit_code"], left["generation"]) == ("finished", 0, 3)
    assert [(m["id"], m["digest"]) for m in left["members"]] == [("m0", "d"), ("m2", "d"), ("m3", "d")]


def test_several_members_killed_at_once_and_the_others_go_on(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "4", "--max-restarts", "1") as job:
        job.wait_step(1)
        job.kill("m0", "m3")
        until(lambda: job.events("view", members=["m1", "m2", "m4"]), 40, "a view with the one restart")
        assert job.status()["restarts_left"] == 0
        assert len(job.events("no_restart")) == 1
        assert job.finish().exit_code == 0


def test_last_members_killed_end_the_job_with_a_sentence(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--holders",)) as job:
        job.wait_step(1)
        job.kill("m0", "m1")
        assert job.end().exit_code == 1
        assert "ended by SIGKILL, and no other member was left: the state is gone" in job.text()
        job.assert_nothing_left()


def test_worker_that_raises_at_import_ends_the_job_without_restarts(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--raise-at-import", "m1")) as job:
        assert job.end().exit_code == 1
        assert "m1 ended with exit code 1 before the first commit" in job.text()
        assert "no such thing as a flux capacitor" in job.text()
        assert not job.events("restart")
        job.assert_nothing_left()


def test_worker_killed_before_the_first_view_is_replaced(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--never-ready", "m1")) as job:
        job.wait("ready", member="m0")
        job.kill("m1")
        job.wait("replace", member="m1")
        assert job.wait_view(1) == ["m0", "m2"]
        job.wait_step(1)
        assert job.finish().exit_code == 0


def test_first_worker_with_another_spec_is_refused_and_the_job_ends(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--other-spec", "m0")) as job:
        assert job.end().exit_code == 1
        refused = job.events("refused")[0]["reason"]
        assert "seed is" in refused
        assert "start every worker with the same seed" in job.text()


def test_joiner_with_another_spec_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--other-spec", "m2")) as job:
        job.wait_step(1)
        job.kill("m1")
        refused = job.wait("refused", member="m2")
        assert refused["reason"].startswith("its seed is 1, the job's is 0")
        job.wait("no_restart", member="m2")
        assert "refused: m2 is refused" in job.text()
        assert job.finish().exit_code == 0


def test_same_bug_on_a_second_member_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    bug = tmp_path / "bug"
    args = ("--bug-file", str(bug), "--bug", "m1", "--bug", "m3")
    with launched(tmp_path, "--nproc-per-node", "3", args=args) as job:
        job.wait_step(1)
        bug.touch()
        assert job.end().exit_code == 1
        reason = job.events("end")[0]["reason"]
        assert reason.startswith("m1 and m3 raised the same exception at step 3, micro-batch 5: it is a fault in the")
        assert job.text().rstrip().endswith("ValueError: odd batch")
        job.assert_nothing_left()


def test_worker_that_sends_garbage_is_ended_before_it_can_harm_and_another_takes_its_place(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "1", args=("--garbage", "m0")) as job:
        assert job.wait("replace")["member"] == "m0"
        job.wait_step(1)
        assert job.finish().exit_code == 0
        assert "m0 sent what no worker sends: not a line of JSON" in job.text()


def test_too_few_ready_workers_end_the_job_at_the_join_deadline(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--join-timeout", "0.3", "--max-restarts", "0")
    with launched(tmp_path, *options, args=("--never-ready", "m1")) as job:
        assert job.end().exit_code == 1
        assert "1 of 2 workers were ready within 0.3 s of the first; missing: m1" in job.text()


def test_a_worker_that_hangs_in_its_start_is_replaced(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", "--join-timeout", "3", args=("--never-ready", "m1")) as job:
        assert job.wait("replace")["member"] == "m1"
        job.wait_step(1)
        assert job.finish().exit_code == 0
        assert "m1 was not ready within 3 s of the first worker: it is ended" in job.text()


def test_sigterm_leaves_nothing_even_if_workers_ignore_it(tmp_path: Path) -> None:
    args = ("--ignore-term", "--child-of", "m1")
    with launched(tmp_path, "--nproc-per-node", "2", "--stop-grace", "0.3", args=args) as job:
        job.wait_step(1)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.end().exit_code == 128 + signal.SIGTERM
        assert "stopped by SIGTERM" in job.text()
        job.assert_nothing_left()


def test_a_second_interrupt_ends_the_grace(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "1", "--stop-grace", "60", args=("--ignore-term",)) as job:
        job.wait_step(1)
        os.kill(job.process.pid, signal.SIGINT)
        job.wait("end")
        os.kill(job.process.pid, signal.SIGINT)
        assert job.end().exit_code == 128 + signal.SIGINT
        job.assert_nothing_left()


def test_children_of_a_killed_worker_end_with_it(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--child-of", "m1")) as job:
        job.wait_step(1)
        session = job.pid("m1")
        job.kill("m1")
        job.wait("exit", member="m1")
        with pytest.raises(ProcessLookupError):
            until(lambda: os.killpg(session, 0), 40, "the group's end")
        assert job.finish().exit_code == 0


def test_workers_end_by_themselves_when_the_agent_is_killed(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2") as job:
        job.wait_step(1)
        job.process.kill()
        job.process.wait(5)
        processes = [Path(f"/proc/{job.pid(member)}") for member in ("m0", "m1")]
        until(lambda: not any(process.exists() for process in processes), 40, "the workers' end")
        assert operator_messages.state(job.run)["state"] == "vanished"


def test_joiner_warms_up_at_low_priority_and_trains_at_full(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", args=("--never-ready", "m2")) as job:
        job.wait_step(1)
        job.kill("m0")
        warming = job.pid("m2")
        usual = _nice(job.process.pid)
        low = (min(usual + WARM_UP_NICE, 19), WARM_UP_NICE)
        until(lambda: (_nice(warming), _group_nice(warming)) == low, 40, "low priority")
        assert _nice(job.pid("m1")) == usual
        os.kill(warming, signal.SIGKILL)
        until(lambda: job.events("view", members=["m1", "m3"]), 40, "m3 joins")
        # It goes ahead of the others until its first step is done.
        newcomer = job.pid("m3")
        until(lambda: (_nice(newcomer), _group_nice(newcomer)) == (usual, 0), 40, "the others' priority")
        assert job.finish().exit_code == 0


def _nice(pid: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, pid)


def _group_nice(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except FileNotFoundError:
        return _nice(pid)  # a kernel without autogroups


def test_fault_at_a_step_kills_the_target_and_only_there(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("# one kill\nkill --target member:m1 --at step=4,phase=backward\n")
    with launched(tmp_path, "--nproc-per-node", "2", "--faults", str(faults)) as job:
        assert job.wait_view(2) == ["m0"]
        job.wait_view(3)
        assert job.events("exit", member="m1")[0]["exit_code"] == -signal.SIGKILL
        assert job.finish().exit_code == 0


def test_inject_needs_an_armed_run(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2") as job:
        job.wait_step(1)
        answer = operator_messages.ask(job.run, AskFault(line="kill --target member:m1"))
        assert (answer.ok, answer.sentence) == (False, NOT_ARMED)
        assert job.finish().exit_code == 0


def test_inject_kills_at_once_or_refuses_with_a_sentence(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", "--inject") as job:
        job.wait_step(1)
        command = [sys.executable, "-m", "elastrain.launcher", "inject", "kill", "--run", str(job.run.path), "--target"]
        done = warm.run([*command, "member:m9"], capture_output=True, text=True, timeout=270)
        assert (done.returncode, "there is no living member m9: there are m0, m1" in done.stderr) == (1, True)
        done = warm.run([*command, "member:random"], capture_output=True, text=True, timeout=270)
        assert (done.returncode, "on its way" in done.stdout) == (0, True)
        assert len(job.wait_view(2)) == 1
        job.wait_view(3)
        assert job.finish().exit_code == 0


def test_status_shows_a_living_run_to_people_and_programs(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2") as job:
        job.wait_step(2)
        command = [sys.executable, "-m", "elastrain.launcher", "status", str(job.run.path)]
        state = json.loads(warm.run([*command, "--json"], capture_output=True, text=True, timeout=270).stdout)
        assert (state["generation"], state["steps_lost"], state["redundancy"]) == (1, 0, "")
        assert [m["pid"] for m in state["members"]] == [job.pid("m0"), job.pid("m1")]
        text = warm.run(command, capture_output=True, text=True, timeout=270).stdout
        assert "generation  1" in text
        assert "generation 1: all 2 workers are ready" in text
        assert job.finish().exit_code == 0


def test_stranger_with_a_wrong_secret_is_turned_away(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "1") as job:
        job.wait_step(1)
        name = job.events("start")[0]["job"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(f"\0elastrain/{name}/agent")
            with pytest.raises(HandshakeRefused, match="different secrets"):
                dial(sock, secret=b"guess", job=name, me="m0", timeout_s=5)
        job.wait("connection_refused")
        assert job.finish().exit_code == 0
