"""Scripts that save and load the optimizer's state themselves, as plain PyTorch does, with kills on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.training import SCRIPTS, Run, run_job, undisturbed

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "saving_training.py"
STEPS = 6


def alone(*arguments: str) -> str:
    (digest,) = set(undisturbed(*arguments, script=SCRIPT).digests.values())
    return digest


def run(folder: Path, *arguments: str, workers: int = 3, **how: Any) -> Run:
    return run_job(folder, workers=workers, script=SCRIPT, arguments=arguments, **how)


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


@pytest.mark.parametrize(("optimizer", "stages"), [("AdamW", 1), ("SGD", 2)])
def test_what_a_script_saves_after_kills_is_what_a_job_of_one_saves(
    tmp_path: Path, optimizer: str, stages: int
) -> None:
    lone, many = tmp_path / "lone", tmp_path / "many"
    lone.mkdir(), many.mkdir()
    told = ("--steps", str(STEPS), "--optimizer", optimizer)
    undisturbed(*told, "--out", str(lone), script=SCRIPT)
    faults = ["kill --target member:m1 --at step=2,phase=forward", "kill --target member:m0 --at step=4,phase=publish"]
    options = ("--stages", str(stages), "--max-restarts", "4") if stages > 1 else ("--max-restarts", "4")
    job = run(tmp_path, *told, "--out", str(many), faults=faults, options=options)
    assert job.exit_code == 0, job.output
    assert len(job.phases_struck()) == 2
    assert set(job.digests.values()) == {alone(*told)}
    assert {file.name for file in many.glob("*.pt")} >= {"0.pt", "5.pt"}
    for file in many.glob("[0-9].pt"):
        assert_equal(torch.load(file, weights_only=True), torch.load(lone / file.name, weights_only=True))


@pytest.mark.parametrize(("optimizer", "late"), [("AdamW", False), ("SGD", True), ("Adagrad", True)])
def test_a_job_goes_on_from_what_the_script_has_loaded(tmp_path: Path, optimizer: str, late: bool) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    whole = ("--steps", str(STEPS), "--optimizer", optimizer)
    undisturbed(*whole, "--out", str(saved), script=SCRIPT)
    told = ("--steps", "3", "--optimizer", optimizer, "--load", str(saved / "2.pt"), *["--late-load"] * late)
    job = run(tmp_path, *told, faults=["kill --target member:m1 --at step=1,phase=backward"])
    assert job.exit_code == 0, job.output
    assert set(job.digests.values()) == {alone(*whole)}


def test_members_that_have_loaded_other_states_are_refused_also_without_backups(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    undisturbed("--steps", "1", "--out", str(saved), script=SCRIPT)
    odd = tmp_path / "odd.py"
    text = SCRIPT.read_text().replace("init(seed=3)", "init(seed=3, backups=0)")
    only = '(("model", model), *[("optimizer", optimizer)] * (job.member == "m0"))'
    odd.write_text(text.replace('(("model", model), ("optimizer", optimizer), ("scheduler", scheduler))', only, 1))
    assert only in odd.read_text()
    job = run_job(tmp_path, workers=2, script=odd, arguments=("--steps", "3", "--load", str(saved / "0.pt")))
    assert job.exit_code == 1, job.output
    assert "optimizer state that the script loaded" in job.output
