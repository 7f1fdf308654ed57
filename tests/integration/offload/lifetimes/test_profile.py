"""Training within a limit leaves a profile: other plans are made of it, and the plan is shown beside what happened."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from elastrain.launcher.cli.command_line import app
from elastrain.offload.errors import OffloadConfigError
from elastrain.offload.lifetimes.pieces.pages import PagePool
from elastrain.offload.lifetimes.recorder import StepRecorder
from elastrain.offload.lifetimes.within import within
from elastrain.offload.planning import profile as profiles
from elastrain.offload.planning.plan_values import Kind
from elastrain.offload.planning.step_recording import Recording
from experiments.offload.models import build
from tests.integration.offload.lifetimes.touching import SHAPE, NothingBesides, tokens


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a small model, at about a third of what it holds."""
    folder, before = tmp_path_factory.mktemp("profile"), torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "elastrain.offload.lifetimes.within.memory_for",
            lambda _model, limit_bytes: (PagePool(limit_bytes), NothingBesides()),
        )
        model, _ = build("gpt", SHAPE)
        optimizer = torch.optim.AdamW(model.parameters())
        training = within(model, optimizer, dirs=[str(folder)], memory_limit=2 << 20)
        for step in range(5):
            with StepRecorder(model, optimizer) as recorder:
                model(tokens(step)).backward()
                training.step(max_grad_norm=1.0)
            if step == 0:
                with pytest.raises(OffloadConfigError, match="there is no plan yet"):
                    training.save_profile(folder / "step.json")
        with pytest.raises(OffloadConfigError, match=r"^the file of a profile must be a path, got None$"):
            training.save_profile(None)  # type: ignore[arg-type]
        with pytest.raises(OffloadConfigError, match=r"^recording must be what StepRecorder.recording\(\) returned"):
            training.save_profile(folder / "step.json", recorder)  # type: ignore[arg-type]
        training.save_profile(folder / "step.json", recorder.recording())
        training.close()
    torch.set_num_threads(before)
    return folder / "step.json"


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["offload", *arguments])


def test_more_memory_and_more_drives_are_never_slower(profile: Path) -> None:
    flags = ("--memory", "2M,4M,64M", "--drive", "0.05/0.02", "--drives", "1,4", "--rating", "600T", "--json")
    told = ask("plan", str(profile), *flags, "--price", "machine=2.5,drive=0.1")
    assert told.exit_code == 0, told.output
    answers = json.loads(told.stdout)["answers"]
    assert [(each["limit_bytes"] >> 20, each["drives"]) for each in answers] == [
        (2, 1), (2, 4), (4, 1), (4, 4), (64, 1), (64, 4)
    ]  # fmt: skip
    small, striped, _, _, large, _ = answers
    assert small["step_s"] >= striped["step_s"] >= large["step_s"]
    assert small["written_bytes"] > 0 == large["written_bytes"]
    assert small["years"] > 0 and large["years"] is None and large["of_ideal"] == pytest.approx(1.0)
    assert large["steps_per_price"] == pytest.approx(3600 / large["step_s"] / 2.6)


def test_the_table_has_a_row_for_each_and_says_what_does_not_fit(profile: Path) -> None:
    told = ask("plan", str(profile), "--memory", "100K,64M", "--host-memory", "1M")
    lines = told.stdout.splitlines()
    assert lines[0].split()[:2] == ["memory", "drives"] and len(lines) == 3
    assert "alone needs" in lines[1] and " 1.000 " in lines[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--memory", "much"), "--memory 'much': write a whole number of bytes"),
        (("--memory", "1K"), "no plan is possible: a limit of 1024 bytes is too small"),
        (("--drive", "6.5"), "--drive '6.5': write GB/s of reads and of writes"),
        (("--drive", "0/1"), "--drive '0/1': write GB/s"),
        (("--drives", "0"), "--drives '0': write whole numbers from 1 to 64"),
        (("--price", "machine"), "--price 'machine': write machine=NUMBER"),
        (("--price", "machine=0"), "nothing costs anything"),
        (("--rating", "x"), "--rating 'x': write"),
    ],
)
def test_what_cannot_be_understood_is_said_in_one_sentence(profile: Path, flags: tuple[str, str], said: str) -> None:
    told = ask("plan", str(profile), *flags)
    assert told.exit_code == 2 and said in told.stderr and told.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", '{"kind":"lifetimes","format":9,"profile":{}}'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "it.json").write_text(text)
    told = ask("plan", str(tmp_path / "it.json"))
    assert told.exit_code == 2 and "holds no profile that can be read" in told.stderr
    assert ask("plan", str(tmp_path / "nothing.json")).exit_code == 2


def test_a_move_to_a_drive_that_is_not_named_is_refused(profile: Path, tmp_path: Path) -> None:
    told = json.loads(profile.read_bytes())
    told["profile"]["tiers"] = []
    (tmp_path / "it.json").write_text(json.dumps(told))
    with pytest.raises(OffloadConfigError, match="a piece lies on a tier that is not named"):
        profiles.read(tmp_path / "it.json")


def names(recording: Recording) -> set[str]:
    return {each.name for each in recording.operators}


def test_a_recorded_step_is_kept_and_told(profile: Path, tmp_path: Path) -> None:
    kept = profiles.read(profile).recording
    assert kept is not None
    told = ask("show", str(profile)).stdout
    assert f"recorded  {len(kept.operators)} operators in " in told
    assert {"aten.mm.default", "aten.gelu_backward.default"} <= names(kept)
    parameters = sum(storage.kind is Kind.PARAMETER for storage in kept.storages)
    seconds = {name: sum(each.seconds for each in kept.operators if each.name == name) for name in names(kept)}
    slowest = max(seconds, key=lambda name: seconds[name]).removeprefix("aten.")
    lines = [line.split() for line in told.splitlines()]
    assert any(line[:3] == ["parameter", str(parameters), "storages"] for line in lines)
    for part in ("optimizer state", "temporary", slowest, " runs "):
        assert part in told
    whole = json.loads(profile.read_bytes())
    whole["profile"]["recording"]["storages"][0]["uses"] = [len(kept.operators)]
    (tmp_path / "it.json").write_text(json.dumps(whole))
    with pytest.raises(OffloadConfigError, match="is used by an operator that was not recorded"):
        profiles.read(tmp_path / "it.json")


def test_the_plan_is_shown_beside_what_happened(profile: Path, tmp_path: Path) -> None:
    told = ask("show", str(profile), "--rating", "600T", "--plot", str(tmp_path / "plan.svg"))
    assert told.exit_code == 0, told.output
    kept = profiles.read(profile)
    for part in (kept.plan.reason, "planned", "happened", "parameters, at most", "written to", "years", "█"):
        assert part in told.stdout
    assert (tmp_path / "plan.svg").stat().st_size > 1000
    assert json.loads(ask("show", str(profile), "--json").stdout)["kind"] == "lifetimes"
    assert ask("show", str(profile), "--plot", str(tmp_path / "plan.unknown")).exit_code == 2


def test_what_happened_stands_beside_what_was_planned(profile: Path) -> None:
    """How near one comes to the other on a quiet machine is measured by `experiments/lifetimes`.

    Points take less than a millisecond here; on a busy machine a new plan is beside a step under the old one.
    """
    from elastrain.offload.report.course import of_step

    kept = profiles.read(profile)
    wished, seen = of_step(kept).values()
    assert wished.total_bytes(0, reads=False) == kept.plan.played.written_bytes
    assert wished.total_bytes(0, reads=True) == kept.plan.played.read_bytes
    assert seen.total_bytes(0, reads=False) > 0
    assert seen.total_bytes(0, reads=True) > 0
    assert 0 < seen.peak_bytes <= kept.limit_bytes
    assert wished.peak_bytes <= kept.limit_bytes
    assert all(min(row.values) >= 0 for row in wished.held)
