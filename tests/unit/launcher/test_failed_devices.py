"""What agents decide when devices fail: the script, a device, or either of them is at fault."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.resume import Resume
from elastrain.base.told_devices import ToldDevices
from elastrain.errors import ConfigError
from elastrain.launcher.agent.node_cache import CompileCache
from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.agent.worker_start import WorkerEnvironment, WorkerWish, environment
from elastrain.launcher.cli.commands import status
from elastrain.launcher.cli.options.torchrun import local_world_size
from elastrain.launcher.shared.job_values import Command, End, Life, Start, TakeNumber
from elastrain.protocol import agent_messages as am
from tests.support.agents import job_config
from tests.unit.launcher.test_core import NOW, Job, logged, of, running, told
from tests.unit.launcher.test_nodes import running as running_nodes

A, B = "GPU (UUID a)", "GPU (UUID b)"


def failed(device: str, step: int = 7, micro_batch: int = 3, signature: str = "AcceleratorError: bad") -> am.Failed:
    traceback = f"Traceback of {device}"
    return am.Failed(step=step, micro_batch=micro_batch, signature=signature, traceback=traceback, device=device)


def on(job: Job, devices: dict[str, str], seen: tuple[str, ...] = (A, B)) -> None:
    for member, device in devices.items():
        job.say(member, am.OnDevice(device=device, seen=seen))


def fail(job: Job, member: str, device: str, **place: Any) -> list[Command]:
    """Let a member's device fail, and its replacement come with the same device."""
    return [*job.say(member, failed(device, **place)), *job.die(member, exit_code=1)]


def come(job: Job, member: str, device: str, seen: tuple[str, ...] = (A, B)) -> list[Command]:
    on(job, {member: device}, seen)
    return job.hello(member)


def test_the_same_error_at_the_same_place_on_two_devices_is_the_scripts() -> None:
    job = running()
    on(job, {"m0": A, "m1": B})
    assert not of(End, fail(job, "m0", A))
    (end,) = of(End, fail(job, "m1", B))
    assert (end.code, end.detail) == (1, f"Traceback of {B}")
    assert end.sentence == (
        f"m0 and m1 raised the same exception at step 7, micro-batch 3, on {A} and on {B}: it is a fault in the "
        "script, not in a device"
    )


def test_the_same_error_at_the_same_place_on_one_device_is_the_devices() -> None:
    job = running()
    on(job, {"m0": A, "m1": A, "m2": B})
    assert not of(End, fail(job, "m0", A))
    commands = fail(job, "m1", A)
    assert not of(End, commands)
    (said,) = logged(commands, "failed")
    assert said.say == (
        f"{A} failed on m1 at step 7, micro-batch 3, for the second time: no worker is started on it any more"
    )


@pytest.mark.parametrize("other", [{"step": 8}, {"micro_batch": 4}, {"signature": "AcceleratorError: worse"}])
def test_other_errors_of_two_devices_end_no_job(other: dict[str, Any]) -> None:
    job = running()
    on(job, {"m0": A, "m1": B})
    fail(job, "m0", A)
    assert not of(End, fail(job, "m1", B, **other))


def test_one_failure_that_two_threads_of_a_member_report_counts_once() -> None:
    job = running()
    on(job, {"m0": A})
    job.say("m0", failed(A))
    job.say("m0", failed(A, signature="AcceleratorError: other words"))
    (start,) = of(Start, job.die("m0", exit_code=1))
    assert start.devices == ToldDevices(seen=(A, B))


def test_after_two_failures_a_worker_is_told_to_leave_the_device_out() -> None:
    job = running()
    on(job, {"m0": A, "m1": B, "m2": B})
    (first,) = of(Start, fail(job, "m0", A))
    assert first.devices == ToldDevices(seen=(A, B))
    come(job, "m3", A)
    (second,) = of(Start, fail(job, "m3", A, step=9))
    assert second.devices == ToldDevices(seen=(A, B), left_out=(A,))


def test_a_worker_that_comes_with_such_a_device_is_refused_and_not_started_again() -> None:
    job = running()
    on(job, {"m0": A, "m1": B, "m2": B})
    fail(job, "m0", A)
    come(job, "m3", A)
    fail(job, "m3", A)
    commands = come(job, "m4", A)
    assert told(commands, am.Refused) == ["m4"]
    assert f"its device, {A}, has failed 2 times or more, and no worker is started on it" in (
        logged(commands, "refused")[0].say
    )
    assert not of(Start, job.die("m4", exit_code=1))
    assert not of(End, job.done)


def test_no_worker_is_started_in_a_slot_that_sees_no_other_device() -> None:
    job = running(2)
    on(job, {"m0": A}, (A,))
    on(job, {"m1": B}, (B,))
    (start,) = of(Start, fail(job, "m0", A))
    come(job, start.member, A, (A,))
    commands = fail(job, start.member, A)
    assert not of(Start, commands)
    assert not of(End, commands)
    assert "no device is left" in logged(commands, "no_restart")[0].say


def test_without_any_device_the_job_ends_and_names_both_causes() -> None:
    job = running(2)
    on(job, {"m0": A, "m1": A}, (A,))
    fail(job, "m0", A, step=5)
    (end,) = of(End, fail(job, "m1", A))
    assert (end.code, end.lost, end.detail) == (1, False, f"Traceback of {A}")
    assert end.sentence == (
        f"no device is left after failures of {A}, the last one on m1 at step 7, micro-batch 3 (AcceleratorError: "
        "bad): either the script makes it fail, or the device is broken: look at the traceback, and try the script on "
        "another device"
    )


def test_a_state_that_is_lost_with_a_device_may_be_had_again_from_a_checkpoint() -> None:
    job = running(1)
    on(job, {"m0": A})
    (end,) = of(End, fail(job, "m0", A))
    assert end.lost
    assert f"{A} failed on m0 at step 7, micro-batch 3, and no other member was left" in end.sentence


def test_before_the_first_commit_the_job_ends_at_once_and_names_both_causes() -> None:
    job = Job(2)
    (end,) = of(End, job.say("m0", failed(A, step=0)))
    assert end.detail == f"Traceback of {A}"
    assert end.sentence == f"{A} failed on m0 before the first commit: the script or the device is at fault"


def test_a_job_that_goes_on_from_a_checkpoint_tries_another_device_before_its_first_commit() -> None:
    earlier = running(1)
    on(earlier, {"m0": A})
    fail(earlier, "m0", A)
    life = Life(
        number=2,
        step=5,
        first_member=2,
        resume=Resume(place="p", name="n", step=5),
        device_failures=tuple(earlier.core.cluster.devices.known),
    )
    job = Job(1, life=life)
    come(job, "m2", A)
    commands = fail(job, "m2", A, step=6)
    assert not of(End, commands)
    assert of(TakeNumber, commands)
    assert of(Start, job.done)[-1].devices == ToldDevices(seen=(A, B), left_out=(A,))


def test_a_failure_in_an_earlier_life_on_another_device_shows_that_the_script_is_at_fault() -> None:
    earlier = running(1)
    on(earlier, {"m0": A})
    fail(earlier, "m0", A)
    job = running(1, life=Life(number=2, device_failures=tuple(earlier.core.cluster.devices.known)))
    assert "a fault in the script" in of(End, fail(job, "m0", B))[0].sentence


def test_simulated_nodes_that_share_a_device_count_its_failures_together() -> None:
    cluster = running_nodes()
    cluster.say("m0", failed(A))
    cluster.die("m0", 1)
    cluster.say("m1", failed(A, step=9))
    assert {agent.core.cluster.devices.told(0) for agent in cluster.living} == {ToldDevices(left_out=(A,))}
    assert all(agent.end is None for agent in cluster.living)


def test_status_names_the_devices_that_have_failed(capsys: pytest.CaptureFixture[str]) -> None:
    job = running()
    on(job, {"m0": A, "m1": A, "m2": B})
    assert describe(job.core, "job", NOW)["devices"] == []
    fail(job, "m0", A)
    fail(job, "m2", B, step=8)
    fail(job, "m1", A)
    state = describe(job.core, "job", NOW)
    assert state["devices"] == [
        {"device": A, "failures": 2, "left_out": True},
        {"device": B, "failures": 1, "left_out": False},
    ]
    status._show(state | {"run_dir": "/run"})
    shown = capsys.readouterr().out
    assert f"device      {A} has failed 2 times; no worker is started on it\n" in shown
    assert f"device      {B} has failed once\n" in shown


def test_a_worker_moves_only_if_its_own_device_is_left_out() -> None:
    devices = ToldDevices(seen=(A, B, "c", "d"), left_out=(B,))
    assert [devices.choose(4, slot) for slot in range(8)] == [0, 2, 2, 3, 0, 3, 2, 3]
    assert ToldDevices().choose(2, 5) == 1
    assert ToldDevices(seen=(A,), left_out=(A,)).choose(1, 0) is None
    assert ToldDevices.from_text(devices.as_text()) == devices
    assert ToldDevices.from_text("") == ToldDevices()


# ---- how many there are


def counted(monkeypatch: pytest.MonkeyPatch, stdout: str, returncode: int = 0, stderr: str = "") -> list[list[str]]:
    """Let a child process count devices as told. Returns the commands that start one."""
    asked: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, returncode, stdout, stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_devices_are_counted_in_a_child_because_the_launcher_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = counted(monkeypatch, "8\n")
    assert [local_world_size("gpu"), local_world_size("auto"), len(asked)] == [8, 8, 2]
    assert asked[0][0] == sys.executable
    assert local_world_size("cpu") == len(os.sched_getaffinity(0))
    assert len(asked) == 2


@pytest.mark.slow
def test_without_devices_auto_counts_cores_and_gpu_is_refused() -> None:
    assert local_world_size("auto") == len(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match="there is no GPU here"):
        local_world_size("gpu")


def test_devices_that_cannot_be_counted_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    counted(monkeypatch, "", 1, "Traceback\nRuntimeError: CUDA driver initialization failed\n")
    with pytest.raises(ConfigError, match=r"cannot be counted \(RuntimeError: CUDA driver initialization failed\)"):
        local_world_size("auto")


def test_workers_are_told_how_cublas_is_deterministic_unless_the_user_has_said_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert told_environment()["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert told_environment()["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def told_environment() -> dict[str, str]:
    common = WorkerEnvironment(
        job="j",
        settings=job_config(workers=1),
        agent="a",
        run_dir=Path("r"),
        secret_file=Path("s"),
        host=None,
        master=lambda: ("h", 1),
        mark={},
        wish=WorkerWish(),
        compile_cache=CompileCache(folder=Path("c")),
    )
    devices = ToldDevices(seen=(A, B), left_out=(B,))
    start = Start(member="m0", slot=0, rank=0, restarts=0, warm_up=False, world_size=1, devices=devices)
    found = environment(common, start)
    assert ToldDevices.from_text(found["ELASTRAIN_DEVICES"]) == devices
    return found
