"""Lightning's Trainer under ElastrainStrategy: as plain Lightning, and through kills as the undisturbed job of one."""

from __future__ import annotations

import csv
import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.shared import once
from tests.support.training import SCRIPTS, TIMEOUT_S, Run, environment, run_job

pytestmark = pytest.mark.slow
pytest.importorskip("lightning", reason="the group integrations is not installed")

SCRIPT = SCRIPTS / "lightning_training.py"


def alone(*arguments: str) -> tuple[list[str], list[str]]:
    """Lines that callbacks saw without a launcher, and the files that were kept."""
    return seen(folder_alone(*arguments))


@functools.cache
def folder_alone(*arguments: str) -> Path:
    def make(folder: Path) -> None:
        command = [sys.executable, str(SCRIPT), "--folder", str(folder), *arguments]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return once(f"lightning {arguments}", make)


def logged(folder: Path) -> tuple[list[dict[str, Any]], dict[str, list[tuple[int, float]]]]:
    """Rows of metrics.csv, and steps and values of each scalar in the event files, as their own readers find them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    place = folder / "logs" / "of-a-test"
    read = accumulators.EventAccumulator(str(place)).Reload()
    scalars = {name: [(e.step, e.value) for e in read.Scalars(name)] for name in read.Tags()["scalars"]}
    scalars.pop("hp_metric", None)
    with (place / "metrics.csv").open() as file:
        return [{n: v for n, v in row.items() if n != "hp_metric"} for row in csv.DictReader(file)], scalars


def seen(folder: Path, member: str = "*") -> tuple[list[str], list[str]]:
    (path,) = folder.glob(f"seen-{member}")
    return path.read_text().splitlines(), sorted(path.name for path in (folder / "kept").iterdir())


def run(folder: Path, *faults: str, more: tuple[str, ...] = (), workers: int = 3, slow_until: str | None = None) -> Run:
    return run_job(
        folder,
        workers=workers,
        arguments=("--folder", str(folder), *more),
        faults=faults,
        script=SCRIPT,
        slow_until=slow_until,
    )


@pytest.mark.parametrize(
    "more",
    [("--sgd", "--accumulate", "1"), ("--sgd", "--accumulate", "2", "--ema"), ("--unfused", "--accumulate", "1")],
    ids=["batches", "averaged", "AdamW"],
)
def test_one_member_has_the_bits_of_plain_lightning(more: tuple[str, ...]) -> None:
    """With at most two micro-batches in a step, whose sum has one order. By itself a job uses the fused AdamW."""
    ours, kept = alone(*more)
    plain, kept_there = alone("--plain", *more)
    assert ours[-1].startswith("end") and ours[-1] == plain[-1]
    assert kept == kept_there and len(kept) == 3
    numbers = [[line.split("{")[0] for line in lines] for lines in (ours, plain)]
    assert numbers[0] == numbers[1], "steps, batches, epochs and learning rates"


def test_a_member_that_joins_in_the_middle_sees_what_all_see(tmp_path: Path) -> None:
    more = ("--ema", "--clip", "0.5", "--epochs", "6")
    done = run(tmp_path, "kill --target member:m0 --at step=5,phase=backward", more=more, slow_until="m3")
    assert done.exit_code == 0, done.output
    wanted, kept = alone(*more)
    joined, _ = seen(tmp_path, "m3")
    assert set(done.digests) == {"m1", "m2", "m3"} and len(joined) > 3
    assert joined == wanted[-len(joined) :]
    for member in ("m1", "m2"):
        assert seen(tmp_path, member) == (wanted, kept)


@pytest.mark.parametrize("victim", ["m0", "m1"])
def test_a_validation_is_shared_with_a_member_killed_on_the_way(tmp_path: Path, victim: str) -> None:
    more = ("--batch", "3", "--log")
    options = ("--max-restarts", "0")
    told = ("--folder", str(tmp_path), *more, "--kill-evaluating", victim)
    done = run_job(tmp_path, workers=3, arguments=told, script=SCRIPT, options=options)
    assert done.exit_code == 0, done.output
    assert f"{victim} ended by SIGKILL" in done.output
    assert logged(tmp_path) == logged(folder_alone(*more))
    for member in {"m0", "m1", "m2"} - {victim}:
        assert seen(tmp_path, member) == alone(*more)
    counts = [int(count) for count in re.findall(r"m\d+ evaluated (\d+)", done.output)]
    assert len(counts) == 2
    assert max(counts) < 2 + 8 * 16  # two batches before training, and eight validations of 16


def test_files_of_loggers_have_each_step_once_whichever_member_wrote(tmp_path: Path) -> None:
    faults = [f"kill --target member:m{at} --at step={(2, 7)[at]},phase=publish" for at in range(2)]
    done = run(tmp_path, *faults, more=("--log",), workers=4)
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 2, done.phases_struck()
    rows, scalars = logged(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(12))
    assert [step for step, _ in scalars["train_step"]] == list(range(12)) and len(scalars["val"]) == 8
    assert (rows, scalars) == logged(folder_alone("--log"))


def test_a_run_goes_on_from_its_own_checkpoint_though_it_replaces_the_file(tmp_path: Path) -> None:
    """A member that joins later finds a newer file, and begins where the others have begun."""
    first, *_ = sorted((folder_alone("--epochs", "2") / "kept").glob("epoch=*"))
    (done_steps,) = re.findall(r"step=(\d+)", first.name)
    more = ("--log", "--epochs", "8")
    wanted, _ = alone("--go-on", str(first), *more)
    assert wanted[0].startswith(f"step {int(done_steps) + 1} ") and wanted[-1].startswith("end 24 ")
    (tmp_path / "kept").mkdir()
    given = shutil.copy(first, tmp_path / "kept" / "last.ckpt")
    faults = ("kill --target member:m0 --at step=5,phase=backward",)
    done = run(tmp_path, *faults, more=("--go-on", str(given), *more), slow_until="m3")
    assert done.exit_code == 0, done.output
    joined, _ = seen(tmp_path, "m3")
    assert set(done.digests) == {"m1", "m2", "m3"} and len(joined) > 3
    assert joined == wanted[-len(joined) :] and seen(tmp_path, "m1")[0] == wanted
    assert logged(tmp_path) == logged(folder_alone("--go-on", str(first), *more))
