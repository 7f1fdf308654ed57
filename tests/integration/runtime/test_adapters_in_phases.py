"""Each adapter loses a worker in every phase of a step, one after the other: bits and history are a job of one's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runtime.test_adapters import ACCELERATOR, TRAINER, rows, told
from tests.integration.runtime.test_lightning import alone, run, seen
from tests.support.training import run_job, undisturbed

pytestmark = pytest.mark.slow
PHASES = [("forward", "reduce", "apply"), ("backward", "commit", "publish")]
in_phases = pytest.mark.parametrize("phases", PHASES, ids="-".join)


def kills(phases: tuple[str, ...]) -> list[str]:
    return [f"kill --target member:m{at} --at step={(2, 5, 8)[at]},phase={phase}" for at, phase in enumerate(phases)]


@in_phases
def test_a_trainer(tmp_path: Path, phases: tuple[str, ...]) -> None:
    one = undisturbed("--out", str(tmp_path / "one"), script=TRAINER)
    arguments = ("--out", str(tmp_path / "job"))
    done = run_job(tmp_path, workers=4, arguments=arguments, faults=kills(phases), script=TRAINER)
    assert (one.exit_code, done.exit_code) == (0, 0), one.output + done.output
    assert len(done.phases_struck()) == 3, done.phases_struck()
    assert set(done.digests.values()) == set(one.digests.values())
    assert told(done.output) == told(one.output)


@in_phases
def test_a_script_of_accelerate(tmp_path: Path, phases: tuple[str, ...]) -> None:
    one = undisturbed("--out", str(tmp_path / "one"), script=ACCELERATOR)
    arguments = ("--out", str(tmp_path / "job"))
    done = run_job(tmp_path, workers=4, arguments=arguments, faults=kills(phases), script=ACCELERATOR)
    assert (one.exit_code, done.exit_code) == (0, 0), one.output + done.output
    assert len(done.phases_struck()) == 3, done.phases_struck()
    assert set(done.digests.values()) == set(one.digests.values())
    assert rows(tmp_path / "job/log.jsonl") == rows(tmp_path / "one/log.jsonl")


@in_phases
def test_lightning(tmp_path: Path, phases: tuple[str, ...]) -> None:
    done = run(tmp_path, *kills(phases), workers=4)
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 3, done.phases_struck()
    assert seen(tmp_path, "m3") == alone()
