"""Running jobs write durable checkpoints: whole, in the background, whatever strikes them meanwhile."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastrain.snapshot.durable.manifest import name_of
from elastrain.snapshot.durable.places.port import place_at
from elastrain.snapshot.durable.publishing import visible
from elastrain.snapshot.durable.reading import Checkpoint
from tests.support import warm
from tests.support.training import SCRIPT, Run, assert_equal_to_undisturbed, environment, run_job, undisturbed
from tests.support.waiting import until

STEPS = ("--steps", "12")


def run(
    folder: Path, place: Path, *, workers: int = 2, every: str = "3", more: tuple[str, ...] = (), **rest: object
) -> Run:
    options = ("--checkpoint-dir", str(place), "--checkpoint-every", every, *more)
    return run_job(folder, workers=workers, arguments=STEPS, options=options, **rest)  # type: ignore[arg-type]


def steps_of(place: Path) -> list[int]:
    """Of the checkpoints that are there, each of which is read back whole, digests and all."""
    found = []
    for name in visible(place_at(str(place))):
        checkpoint = Checkpoint.open([place_at(str(place))], name)
        assert checkpoint.verify() == []
        found.append(checkpoint.manifest.step)
    return found


def went_on_from(folder: Path, place: Path, step: int, workers: int) -> None:
    """A job that goes on from there ends with the parameters of the undisturbed one."""
    folder.mkdir()
    done = run_job(folder, workers=workers, arguments=STEPS, options=("--checkpoint-dir", str(place)))
    assert done.exit_code == 0, done.output
    assert f"the job goes on after step {step}" in done.output
    assert set(done.digests.values()) == set(undisturbed(*STEPS).digests.values())


def test_what_is_written_meanwhile_is_the_state_of_its_step(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    done = run(tmp_path, place, workers=3, more=("--keep", "2"))
    assert_equal_to_undisturbed(done, *STEPS)
    there = steps_of(place)
    # One may be passed over because the one before is still being written; the last is written in any case.
    assert there[-1] == 11 and set(there) <= {2, 5, 8, 11} and "is complete: " in done.output


def test_a_script_asks_for_one_at_any_time_and_it_is_the_state_to_go_on_from(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    options = ("--checkpoint-dir", str(place))
    done = run_job(tmp_path, workers=2, arguments=(*STEPS, "--checkpoint-at", "4"), options=options)
    assert_equal_to_undisturbed(done, *STEPS)
    (step,) = steps_of(place)
    assert step >= 4
    went_on_from(tmp_path / "again", place, step, workers=3)


def test_after_the_last_step_the_end_of_the_job_waits_for_the_checkpoint_that_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    last = ("--checkpoint-after", "5", "--break-at", "5")
    options = ("--checkpoint-dir", str(place))
    done = run_job(tmp_path, workers=3, arguments=(*STEPS, *last), options=options)
    assert done.exit_code == 0, done.output
    assert steps_of(place) == [5]
    assert "the checkpoint of step 5 is complete: " in done.output
    went_on_from(tmp_path / "again", place, 5, workers=2)


def test_a_member_that_dies_while_it_is_written_spoils_neither_job_nor_checkpoints(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    done = run(tmp_path, place, workers=3, every="1", faults=["kill --target member:m1 --at step=6,phase=backward"])
    assert_equal_to_undisturbed(done, *STEPS)
    assert steps_of(place)


@pytest.fixture
def full_disk(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system with next to no room, or as much as is asked for."""
    folder, size = Path(f"/tmp/writing-full-{os.getpid()}"), getattr(request, "param", "64k")
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True)
    if mounted.returncode != 0:
        folder.rmdir()
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
        folder.rmdir()


def test_a_full_disk_is_said_and_the_job_goes_on(tmp_path: Path, full_disk: Path) -> None:
    done = run(tmp_path, full_disk, every="4")
    assert_equal_to_undisturbed(done, *STEPS)
    assert "is given up, because" in done.output and "there is no room" in done.output
    assert visible(place_at(str(full_disk))) == []


@pytest.mark.parametrize("full_disk", ["1m"], indirect=True)
def test_a_disk_that_is_full_of_interrupted_writes_has_room_again_once_a_checkpoint_is_given_up(
    tmp_path: Path, full_disk: Path
) -> None:
    folder = full_disk / "checkpoints"
    (tmp_path / "first").mkdir()
    assert run(tmp_path / "first", folder, every="5").exit_code == 0
    first, *later = visible(place_at(str(folder)))
    for name in later:  # the one of step 4 is always taken
        shutil.rmtree(folder / name)
    interrupted = folder / name_of(1, 0)
    interrupted.mkdir()
    (interrupted / "part-m0-00000000").write_bytes(bytes(700_000))
    (tmp_path / "second").mkdir()
    slow = tmp_path / "slow"
    slow.touch()
    options = ("--checkpoint-dir", str(folder), "--checkpoint-every", "1", "--keep", "1")
    arguments = (*STEPS, "--slow-while", str(slow))
    done = run_job(tmp_path / "second", workers=2, arguments=arguments, options=options)
    assert "there is no room: free some, or keep fewer checkpoints" in done.output
    assert set(done.digests.values()) == set(undisturbed(*STEPS).digests.values())
    assert visible(place_at(str(folder)))[-1] > first and not interrupted.exists()


def test_a_directory_that_is_removed_while_the_job_runs_is_not_filled_with_what_no_checkpoint_comes_of(
    tmp_path: Path,
) -> None:
    place, brake = tmp_path / "checkpoints", tmp_path / "brake"
    brake.touch()
    options = ("--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), "--checkpoint-dir", str(place))
    command = [sys.executable, "-m", "elastrain.launcher", "run", *options, "--checkpoint-every", "1"]
    with (tmp_path / "output").open("wb") as output:
        command += [str(SCRIPT), *STEPS, "--slow-while", str(brake)]
        job = warm.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    assert until(lambda: any(place.glob("*/manifest.json")) or job.poll() is not None)
    place.rename(tmp_path / "away")
    brake.unlink()
    assert job.wait(60) == 0
    assert "belongs to no job now" in (tmp_path / "output").read_text()
    assert [path for path in place.rglob("*") if path.is_file()] == []


def test_another_jobs_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    assert run(tmp_path / "first", place).exit_code == 0
    done = run(tmp_path / "second", place, more=("--resume", "none"))
    assert done.exit_code == 2
    assert done.output.startswith("elastrain: --checkpoint-dir: ") and done.output.count("\n") == 1
    assert "holds checkpoints of job" in done.output
    assert not (tmp_path / "second" / "run").exists()
    assert steps_of(place)


def test_every_without_a_directory_is_refused(tmp_path: Path) -> None:
    done = run_job(tmp_path, workers=1, arguments=STEPS, options=("--checkpoint-every", "3"))
    assert done.exit_code != 0 and "--checkpoint-dir" in done.output


@pytest.mark.parametrize(("nodes", "number"), [(1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_job_that_is_stopped_writes_one_last_checkpoint(nodes: int, number: signal.Signals, tmp_path: Path) -> None:
    place, run_folder, slow = tmp_path / "checkpoints", tmp_path / "run", tmp_path / "slow"
    slow.touch()
    several = ["--local-nodes", str(nodes)] if nodes > 1 else ["--nproc-per-node", "2"]
    options = [*several, "--run-dir", str(run_folder), "--checkpoint-dir", str(place)]
    command = [
        sys.executable,
        "-m",
        "elastrain.launcher",
        "run",
        *options,
        str(SCRIPT),
        *STEPS,
        "--slow-while",
        str(slow),
    ]
    job = warm.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    # Each agent has heard of a commit: before the first one there is nothing to keep.
    journals = lambda: [f.read_text() for f in run_folder.rglob("members/m*.jsonl")]  # noqa: E731
    until(lambda: [text.count('"passed"') > 1 for text in journals()] == [True, True], 120.0)
    job.send_signal(number)
    output, _ = job.communicate(timeout=360.0)
    assert job.returncode == 128 + number, output
    assert "one last checkpoint is written" in output and "is complete: " in output
    (step,) = steps_of(place)
    passed = [e["step"] for e in Run(0, "", _members(run_folder)).journals["m0"] if e["event"] == "passed"]
    assert passed[-1] == step  # nothing that was committed is lost
    went_on_from(tmp_path / "again", place, step, workers=1)


def _members(folder: Path) -> Path:
    """The folder in which the journal of m0 is, whichever node it was on."""
    return next(folder.rglob("members/m0.jsonl")).parent.parent
