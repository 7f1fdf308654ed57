"""Devices that do not fit: unlike ones, a member without one, a model that moves, a batch that stays behind."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest

from tests.support.training import SCRIPTS, Run, run_job

pytestmark = pytest.mark.slow
SCRIPT = SCRIPTS / "unlike_devices.py"


def run(folder: Path, *arguments: str, workers: int = 1, options: tuple[str, ...] = ()) -> Run:
    return run_job(folder, workers=workers, arguments=arguments, options=options, script=SCRIPT)


@pytest.mark.parametrize(
    ("device", "setting", "values"),
    [('{"name": "Late B"}', "device name", ("Late Test Device", "Late B")), ("cpu", "device", ("late", "cpu"))],
)
def test_a_member_with_another_device_is_refused_with_both_values(
    device: str, setting: str, values: tuple[str, str], tmp_path: Path
) -> None:
    done = run(tmp_path, "--of-m1", device, workers=2)
    assert done.exit_code == 1
    of = dict(zip(("m0", "m1"), values, strict=True))
    ways = [f"{who} is refused: its {setting} is {of[who]}, the job's is {of[job]}: " for who, job in permutations(of)]
    assert any(sentence in done.output for sentence in ways), done.output  # who comes first decides
    assert "Traceback" not in done.output
    assert not [e for events in done.journals.values() for e in events if e["event"] == "passed"]


def test_equal_devices_train_together_and_the_journal_has_each_with_its_driver(tmp_path: Path) -> None:
    done = run(tmp_path, "--of-m1", '{"uuid": "late-00000001"}', workers=2)
    assert done.exit_code == 0, done.output
    assert len(set(done.digests.values())) == 1
    told = {m: e for m, events in done.journals.items() for e in events if e["event"] == "device"}
    assert {m: e["uuid"] for m, e in told.items()} == {"m0": "late-00000000", "m1": "late-00000001"}
    assert all({"driver", "name", "runtime"} <= set(e) for e in told.values())


@pytest.mark.parametrize("when", ["before the loop", "in the loop"])
def test_a_model_that_moves_after_prepare_is_refused_with_both_devices(when: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--moved", when)
    assert done.exit_code == 1
    assert "the model was on late:0 in job.prepare and is on cpu now: call model.to('cpu') before" in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("what", ["inputs", "targets"])
def test_a_batch_that_was_left_on_the_host_says_how_to_move_it(what: str, tmp_path: Path) -> None:
    done = run(tmp_path, "--left-on-the-host", what)
    assert done.exit_code == 1
    assert "Expected all tensors to be on the same device" in done.output
    assert "(batch.to(device))" in done.output


def test_a_resume_on_another_kind_of_device_is_refused_with_the_option_that_accepts_it(tmp_path: Path) -> None:
    written = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-every", "1")
    assert run(tmp_path / "a", "--device", "cpu", options=written).exit_code == 0
    refused = run(tmp_path / "b", "--steps", "4", options=written)
    assert refused.exit_code == 1
    assert "m0 is refused: its device is late, the checkpoint's is cpu: start the job as it was" in refused.output
    assert "--accept-changes" in refused.output
