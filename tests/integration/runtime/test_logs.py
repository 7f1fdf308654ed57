"""Real workers log and are killed in every phase: each line is in the file once, with the figures of a job of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.offline_runs import rows
from tests.support.training import SCRIPTS, Run, run_job, undisturbed

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "logged_training.py"
STEPS = 12


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def figures(path: Path) -> list[tuple[Any, ...]]:
    """All lines but what differs between two jobs: the run, and the time."""
    return [tuple((k, v) for k, v in line.items() if k not in ("run", "seconds")) for line in lines(path)]


def of_one(folder: Path, *arguments: str) -> list[tuple[Any, ...]]:
    path = folder / "one.jsonl"
    alone = undisturbed("--steps", str(STEPS), "--log", str(path), *arguments, script=SCRIPT)
    assert alone.exit_code == 0, alone.output
    told = figures(path)
    assert [dict(line)["step"] for line in told] == sorted([*range(STEPS), 4, 9])
    return told


def run(folder: Path, *faults: str, workers: int = 4, options: tuple[str, ...] = (), more: tuple[str, ...] = ()) -> Run:
    arguments = ("--steps", str(STEPS), "--log", str(folder / "log.jsonl"), *more)
    return run_job(folder, workers=workers, arguments=arguments, options=options, faults=faults, script=SCRIPT)


@pytest.mark.parametrize(
    "phases",
    [("publish", "forward", "commit"), ("backward", "apply", "publish"), ("reduce", "publish", "shutdown")],
    ids="-".join,
)
def test_no_line_is_missing_and_none_is_there_twice_whoever_wrote(tmp_path: Path, phases: tuple[str, ...]) -> None:
    """The member of rank 0 dies three times: each time it is the one that writes."""
    faults = [
        f"kill --target member:m{at} --at step={(2, 5, STEPS if phase == 'shutdown' else 9)[at]},phase={phase}"
        for at, phase in enumerate(phases)
    ]
    done = run(tmp_path, *faults, more=("--backups", "2"))
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 3, done.phases_struck()
    assert figures(tmp_path / "log.jsonl") == of_one(tmp_path)
    assert len({line["run"] for line in lines(tmp_path / "log.jsonl")}) == 1


def test_a_job_that_goes_on_from_checkpoints_goes_on_in_the_same_file_under_the_same_run(tmp_path: Path) -> None:
    """In a second life of the same job, and resumed by hand from before the end of the file."""
    checkpoints = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "3")
    more = ("--log", str(tmp_path / "log.jsonl"), "--backups", "0", "--slow", "0.05")
    for name, steps, options, faults in (
        ("first", 8, checkpoints, ["kill --target member:m0 --at step=5,phase=publish"]),
        ("second", STEPS, (*checkpoints, "--resume", str(tmp_path / "checkpoints")), []),
    ):
        (tmp_path / name).mkdir()
        arguments = ("--steps", str(steps), *more)
        done = run_job(tmp_path / name, workers=2, arguments=arguments, options=options, faults=faults, script=SCRIPT)
        assert done.exit_code == 0, done.output
        told = lines(tmp_path / "log.jsonl")
        assert [line["step"] for line in told] == [line["step"] for line in told if line["step"] < steps]
    assert figures(tmp_path / "log.jsonl") == of_one(tmp_path)
    assert len({line["run"] for line in told}) == 1
    assert len(list(tmp_path.glob("log*.jsonl"))) == 1, "no file was moved aside"


def test_event_files_have_each_step_once_after_two_writers_were_killed(tmp_path: Path) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    faults = [
        "kill --target member:m0 --at step=3,phase=publish",
        "kill --target member:m1 --at step=7,phase=publish",
    ]
    done = run(tmp_path, *faults, more=("--backups", "2", "--events", str(tmp_path / "events")))
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 2
    read = accumulators.EventAccumulator(str(tmp_path / "events")).Reload()
    of_file = [(line["step"], line["loss"]) for line in lines(tmp_path / "log.jsonl") if "loss" in line]
    assert [event.step for event in read.Scalars("loss")] == [step for step, _ in of_file] == list(range(STEPS))
    assert [event.value for event in read.Scalars("loss")] == pytest.approx([loss for _, loss in of_file])


def test_a_loader_and_a_summary_writer_of_torch_keep_bits_and_values_through_kills(tmp_path: Path) -> None:
    """The digest and the figures are those of the job's own loader and of `job.log` in a job of one."""
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    path, events = tmp_path / "one.jsonl", tmp_path / "events"
    steps = ("--steps", str(STEPS))
    own = undisturbed(*steps, "--log", str(path), "--micro-batch-size", "3", script=SCRIPT)
    assert own.exit_code == 0, own.output
    faults = [
        "kill --target member:m0 --at step=3,phase=publish",
        "kill --target member:m1 --at step=7,phase=backward",
        "kill --target member:m2 --at step=9,phase=commit",
    ]
    arguments = (*steps, "--of-torch", str(events), "--backups", "2")
    done = run_job(tmp_path, workers=4, arguments=arguments, faults=faults, script=SCRIPT)
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 3
    assert set(done.digests.values()) == set(own.digests.values()) and len(set(own.digests.values())) == 1
    read = accumulators.EventAccumulator(str(events)).Reload()
    for name in ("loss", "accuracy"):
        wanted = [(100 + line["step"], line[name]) for line in lines(path) if name in line]
        assert [event.step for event in read.Scalars(name)] == [step for step, _ in wanted]
        assert [event.value for event in read.Scalars(name)] == pytest.approx([value for _, value in wanted])


def test_offline_runs_of_wandb_have_one_id_and_each_step_once_after_two_writers_were_killed(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    faults = [
        "kill --target member:m0 --at step=3,phase=publish",
        "kill --target member:m1 --at step=7,phase=publish",
    ]
    done = run(tmp_path, *faults, more=("--backups", "2", "--wandb", str(tmp_path)))
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 2
    told = rows(tmp_path, "loss")
    of_file = [(line["step"], line["loss"]) for line in lines(tmp_path / "log.jsonl") if "loss" in line]
    assert [(step, loss) for _, step, loss in told] == of_file
    assert len({name for name, *_ in told}) == 1
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 3


def test_figures_of_stages_are_those_of_one(tmp_path: Path) -> None:
    done = run(tmp_path, workers=2, options=("--stages", "2"))
    assert done.exit_code == 0, done.output
    assert figures(tmp_path / "log.jsonl") == of_one(tmp_path)


def test_a_script_that_logs_on_one_member_only_is_told_which_call_differs(tmp_path: Path) -> None:
    done = run(tmp_path, workers=2, more=("--only-rank-0",))
    assert done.exit_code == 1
    assert "members entered step 1 with different numbers of job.log calls" in done.output
