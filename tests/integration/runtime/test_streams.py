"""Streams in real jobs: members that are killed, that join and that resume read on as if nothing had happened."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.streams.run import PHASES, SCHEDULES, STEPS, draw
from tests.support.sources import ROOT
from tests.support.training import Run, run_job

pytest.importorskip("torchdata", reason="elastrain[streams] is not installed")
SCRIPT = ROOT / "experiments/streams/train.py"


def run(folder: Path, workers: int, name: str, *, until: int = STEPS, kill: str = "") -> Run:
    read = folder / name / "read"
    arguments = ("--source", "generator", "--folder", str(folder), "--read", str(read), "--steps", str(until))
    options = ("--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "2") if name != "alone" else ()
    (folder / name).mkdir()
    faults = (f"kill --target member:m1 --at {kill}",) if kill else ()
    return run_job(folder / name, workers=workers, arguments=arguments, options=options, faults=faults, script=SCRIPT)


def read(done: Run) -> dict[str, set[str]]:
    """The samples of each micro-batch, as all members have read them."""
    found: dict[str, set[str]] = {}
    for file in (done.folder.parent / "read").iterdir():
        for place, samples in re.findall(r"^(\d+ \d+) ([\d,]+);$", file.read_text(), re.MULTILINE):
            found.setdefault(place, set()).add(samples)
    return found


@pytest.mark.slow
def test_losses_joins_and_two_resumes_use_each_sample_once(tmp_path: Path) -> None:
    alone = run(tmp_path, 1, "alone")
    lives = [
        run(tmp_path, 3, "first", until=5, kill="step=2,phase=backward"),
        run(tmp_path, 1, "second", until=8),
        run(tmp_path, 2, "third", kill="step=9,phase=commit"),
    ]
    assert [done.exit_code for done in (alone, *lives)] == [0] * 4, lives[-1].output
    assert set(lives[-1].digests.values()) == set(re.findall(r"digest (\w+)", alone.output))
    for done in lives:
        assert {place: samples for place, samples in read(alone).items() if place in read(done)} == read(done)
    assert "is read again up to its place" in lives[1].output


def test_schedules_have_losses_in_all_phases_joins_and_resumes() -> None:
    drawn = [draw(number, ("generator", "datasets", "webdataset", "streaming")) for number in range(SCHEDULES)]
    assert {len(each.lives) for each in drawn} == {1, 2, 3}
    assert {life.members for each in drawn for life in each.lives} == {1, 2, 3, 4}
    faults = " ".join(fault for each in drawn for life in each.lives for fault in life.faults)
    assert sum(phase in faults for phase in PHASES) >= 4
