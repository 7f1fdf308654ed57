"""Lightning's Trainer under ElastrainStrategy: as plain Lightning, and through kills as the undisturbed job of one."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shared import once
from tests.support.training import SCRIPTS, TIMEOUT_S, Run, environment, run_job

pytestmark = pytest.mark.slow
pytest.importorskip("lightning", reason="the group integrations is not installed")

SCRIPT = SCRIPTS / "lightning_training.py"


@functools.cache
def alone(*arguments: str) -> tuple[list[str], list[str]]:
    """Lines that callbacks saw without a launcher, and the files that were kept."""

    def make(folder: Path) -> None:
        command = [sys.executable, str(SCRIPT), "--folder", str(folder), *arguments]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    return seen(once(f"lightning {arguments}", make))


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


@pytest.mark.parametrize("more", [("--accumulate", "1"), ("--accumulate", "2", "--ema")], ids=["batches", "averaged"])
def test_one_member_has_the_bits_of_plain_lightning(more: tuple[str, ...]) -> None:
    """With SGD, and at most two micro-batches in a step: their sum has one order."""
    ours, kept = alone("--sgd", *more)
    plain, kept_there = alone("--sgd", "--plain", *more)
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


@pytest.mark.parametrize("phases", [("forward", "reduce", "publish"), ("backward", "apply", "commit")], ids="-".join)
def test_rank_0_dies_three_times(tmp_path: Path, phases: tuple[str, ...]) -> None:
    faults = [f"kill --target member:m{at} --at step={(2, 5, 8)[at]},phase={phase}" for at, phase in enumerate(phases)]
    done = run(tmp_path, *faults, workers=4)
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 3, done.phases_struck()
    assert seen(tmp_path, "m3") == alone()
