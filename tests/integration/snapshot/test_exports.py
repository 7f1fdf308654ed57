"""What a real job has written is what plain PyTorch loads, bit for bit; and a job begins from it."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

from elastrain.launcher.cli.command_line import app
from tests.support.sources import ROOT
from tests.support.training import Run, run_job

SCRIPT = ROOT / "tests/integration/scripts/exported_training.py"


def checkpoint(*arguments: object) -> None:
    done = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    assert done.exit_code == 0, done.output


def run(folder: Path, *options: object) -> Run:
    folder.mkdir()
    done = run_job(
        folder, workers=2, arguments=[str(folder / "end.pt")], options=[str(each) for each in options], script=SCRIPT
    )
    assert done.exit_code == 0, done.output
    return done


def test_an_export_of_a_job_is_its_model_and_begins_another_job(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    run(tmp_path / "first", "--checkpoint-dir", place, "--checkpoint-every", "6")
    checkpoint("verify", place)
    checkpoint("export", place, "--out", tmp_path / "torch", "--format", "torch")
    own = torch.load(tmp_path / "first/end.pt", weights_only=True)
    exported = torch.load(tmp_path / "torch/model.pt", weights_only=True)
    assert own.keys() == exported.keys()
    assert [
        name for name in own if own[name].dtype != exported[name].dtype or not own[name].equal(exported[name])
    ] == []
    state = torch.load(tmp_path / "torch/optimizer.pt", weights_only=True)
    assert {float(entries["step"]) for entries in state["state"].values()} == {6.0}
    assert all(exported["body.weight"].shape == state["state"][3][name].shape for name in ("exp_avg", "exp_avg_sq"))

    checkpoint("export", place, "--out", tmp_path / "safe")
    files = (tmp_path / "safe/model.safetensors", "--optimizer", tmp_path / "safe/optimizer.safetensors")
    checkpoint("import", *files, "--into", tmp_path / "imported")
    again = run(tmp_path / "again", "--resume", tmp_path / "imported")
    assert "the job" in again.output
    later = torch.load(tmp_path / "again/end.pt", weights_only=True)
    assert not later["body.weight"].equal(own["body.weight"]), "six more steps were made"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.equal(other)
