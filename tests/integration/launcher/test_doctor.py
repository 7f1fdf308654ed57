"""`elastrain doctor --memory` on real scripts, and against what the members of a real job say that they hold."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastrain.base.processes import state_of
from elastrain.memory.memory_budget import WRITING_BYTES
from tests.support import warm
from tests.support.training import SCRIPTS, environment, run_job
from tests.support.waiting import until
from tests.support.warm import ROOT

SCRIPT = SCRIPTS / "squeezed_training.py"
WIDE = ("--steps", "3", "--width", "2048", "--layers", "3", "--micro-batch-size", "16")
"""Parameters of 35 MB under AdamW, hardly any activations."""
LIMIT = ("--memory-limit", "64G")

pytestmark = pytest.mark.slow


def doctor(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--memory", *arguments]
    return warm.run(command, env=environment(), capture_output=True, text=True, timeout=360)


def test_what_is_stated_is_what_the_members_of_a_job_find(tmp_path: Path) -> None:
    asked = doctor(str(SCRIPT), "--nproc-per-node", "3", *LIMIT, "--json", "--", *WIDE)
    assert asked.returncode == 0, asked.stderr
    stated = {each["member"]: each for each in json.loads(asked.stdout)["members"]}
    run = run_job(tmp_path, script=SCRIPT, workers=3, arguments=WIDE, options=LIMIT)
    assert run.exit_code == 0, run.output
    assert set(run.journals) == set(stated) == {"m0", "m1", "m2"}
    for member, journal in run.journals.items():
        said, first = stated[member], next(each for each in journal if each["event"] == "room")
        assert said["model"] == first["need_parameters_bytes"]
        assert said["gradients"] == first["need_gradients_bytes"]
        states_bytes = said["shards"] + said["backups"] + said["unverified"]
        assert states_bytes == pytest.approx(first["need_shards_bytes"], rel=0.05)
        assert said["base"] == pytest.approx(first["need_base_bytes"], rel=0.05)
        peaks = [each["peak_bytes"] for each in journal if each["event"] == "memory"]
        assert max(peaks) <= 1.05 * said["total"], "as the kernel counts it"


def test_what_is_stated_with_stages_is_what_the_members_of_pipelines_find(tmp_path: Path) -> None:
    script, arguments = SCRIPTS / "piped_training.py", ("--steps", "3", "--micro-batch-size", "257")
    stages = ("--stages", "3")
    asked = doctor(str(script), "--nproc-per-node", "3", *stages, *LIMIT, "--json", "--", *arguments)
    assert asked.returncode == 0, asked.stderr
    stated = {each["member"]: each for each in json.loads(asked.stdout)["members"]}
    run = run_job(tmp_path, script=script, workers=3, arguments=arguments, options=(*stages, *LIMIT))
    assert run.exit_code == 0, run.output
    assert set(run.journals) == set(stated) == {"m0", "m1", "m2"}
    for member, journal in run.journals.items():
        said = stated[member]
        rooms = [each for each in journal if each["event"] == "room"]
        tasks_bytes = {each["need_activations_bytes"] + each["need_boundaries_bytes"] for each in rooms} - {0}
        assert tasks_bytes == {said["activations"] + said["boundaries"]}
        assert said["model"] == max(each["need_parameters_bytes"] for each in rooms)
        step, moving, _ = said["moments"]
        assert said["moment"] == moving["moment"] == "while holders move"
        assert said["total"] == max(each["total"] for each in said["moments"])
        # The first plan with tasks is the first one that is told; states were measured before the later ones.
        first = next(each for each in rooms if each["need_boundaries_bytes"])
        assert step["gradients"] == first["need_gradients_bytes"]
        for each in rooms:
            assert each["need_gradients_bytes"] <= 1.05 * (moving["gradients"] + moving["copies"])
            assert each["need_shards_bytes"] <= 1.05 * (moving["shards"] + moving["backups"] + moving["unverified"])
        assert said["base"] == pytest.approx(rooms[0]["need_base_bytes"], rel=0.05)
        peaks = [each["peak_bytes"] for each in journal if each["event"] == "memory"]
        assert max(peaks) <= 1.05 * said["total"], "as the kernel counts it"


def test_a_limit_that_is_too_small_for_stages_is_refused_as_by_the_members() -> None:
    script, size = SCRIPTS / "piped_training.py", ("--nproc-per-node", "3", "--stages", "3")
    asked = doctor(str(script), *size, "--memory-limit", "100M", "--json", "--", "--steps", "3")
    assert asked.returncode == 1
    assert "MiB too small for this plan" in asked.stderr
    assert "of its blocks 'layers." in asked.stderr
    assert "legal cuts: before 'layers.0', before 'layers.1'" in asked.stderr


@pytest.mark.parametrize(
    ("kind", "workers", "backups"),
    [
        ("gpt", 2, 1),
        ("conv", 2, 1),
        ("frozen", 2, 1),
        pytest.param("gpt", 3, 2, marks=pytest.mark.on_demand),
        pytest.param("frozen", 3, 0, marks=pytest.mark.on_demand),
    ],
)
def test_members_stay_within_what_is_stated_of_each_kind_of_model(
    kind: str, workers: int, backups: int, tmp_path: Path
) -> None:
    """While they write checkpoints onto local disks: every holder its copy."""
    script, size = SCRIPTS / "measured_training.py", ("--nproc-per-node", str(workers), *LIMIT)
    writes = ("--checkpoint-dir", str(tmp_path / "checkpoints"), "--checkpoint-layout", "local")
    arguments = ("--kind", kind, "--steps", "4", "--backups", str(backups))
    asked = doctor(str(script), *size, *writes, "--json", "--", *arguments)
    assert asked.returncode == 0, asked.stderr
    stated = {each["member"]: each for each in json.loads(asked.stdout)["members"]}
    every = ("--checkpoint-every", "1")
    run = run_job(tmp_path, script=script, workers=workers, arguments=arguments, options=(*LIMIT, *writes, *every))
    assert run.exit_code == 0, run.output
    for member, journal in run.journals.items():
        steps = [each for each in journal if each["event"] == "memory"]
        assert max(each["peak_bytes"] for each in steps) <= 1.05 * stated[member]["total"], (member, steps, stated)
        assert max(each["captured_bytes"] for each in steps) <= stated[member]["staging"] - WRITING_BYTES


@pytest.mark.on_demand
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("kind", "batch"), [("gpt2", 1), ("gpt2", 4), ("t5", 1), ("t5", 4)])
def test_models_of_others_hold_what_is_stated(kind: str, batch: int, stages: int, tmp_path: Path) -> None:
    """At the most, as the kernel counts it. Plans have room for the worst order in which gradients and copies come."""
    script, size = SCRIPTS / "measured_training.py", ("--nproc-per-node", "2", "--stages", str(stages), *LIMIT)
    arguments = ("--kind", kind, "--steps", "5", "--batch", str(batch))
    asked = doctor(str(script), *size, "--json", "--", *arguments)
    assert asked.returncode == 0, asked.stderr
    stated = {each["member"]: each["total"] for each in json.loads(asked.stdout)["members"]}
    run = run_job(tmp_path, script=script, workers=2, arguments=arguments, options=size[2:])
    assert run.exit_code == 0, run.output
    for member, journal in run.journals.items():
        held = max(each["peak_bytes"] for each in journal if each["event"] == "memory")
        assert 0.85 < held / stated[member] < 1.05, (member, held, stated)


def rows(output: str) -> list[dict[str, str]]:
    head, *lines = (line.split() for line in output.splitlines() if re.match(r"member|m\d", line))
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_an_example_under_a_limit_that_is_too_small(tmp_path: Path) -> None:
    asked = doctor(
        str(ROOT / "examples/finetune.py"),
        *("--nproc-per-node", "8", "--backups", "1", "--memory-limit", "10M", "--checkpoint-dir", str(tmp_path)),
    )
    assert asked.returncode == 1, "as the job itself would end"
    assert "too small for this plan" in asked.stderr
    stated = rows(asked.stdout)
    assert [each["member"] for each in stated] == [f"m{rank}" for rank in range(8)]
    assert any(each["staging"] != "0" for each in stated)
    columns, below = list(stated[0])[2:], asked.stdout.splitlines()[9:]
    assert [line.split()[0] for line in below[: len(columns)]] == columns, "a line for each column"
    moments = below[len(columns) :]
    assert moments[0].split()[3:] == columns
    assert moments[1].startswith("in a step")
    assert asked.stdout.splitlines()[-1].startswith("worst: member m")
    assert list(tmp_path.iterdir()) == [], "no job was started"


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (None, 2, "elastrain: there is no script '{}': check the path"),
        ("print('done')", 2, "elastrain: {} ended without calling job.prepare, so nothing is known of its model"),
        ("raise RuntimeError('no data')", 1, "elastrain: {} ended with code 1 before job.prepare"),
        ("import os; os.kill(os.getpid(), 9)", 1, "elastrain: {} ended with signal 9 before job.prepare"),
    ],
)
def test_a_script_that_says_nothing_ends_with_a_sentence(
    tmp_path: Path, text: str | None, code: int, sentence: str
) -> None:
    script = tmp_path / "train.py"
    if text is not None:
        script.write_text(text)
    asked = doctor(str(script), "--json")
    assert asked.returncode == code
    assert asked.stdout == ""
    assert asked.stderr.splitlines()[-1].startswith(sentence.format(script))


def test_a_script_ends_with_the_command_that_asked_it(tmp_path: Path) -> None:
    script, pid_file = tmp_path / "train.py", tmp_path / "pid"
    script.write_text(
        f"import os, time; open({str(tmp_path / 'new')!r}, 'w').write(str(os.getpid()));"
        f"os.rename({str(tmp_path / 'new')!r}, {str(pid_file)!r}); time.sleep(600)"
    )
    command = [sys.executable, "-m", "elastrain.launcher", "doctor", "--memory", str(script)]
    with warm.Popen(command, env=environment()) as asking:
        until(pid_file.exists)
        pid = int(pid_file.read_text())
        asking.kill()
        asking.wait()
        until(lambda: state_of(pid) in ("", "Z"))


def test_doctor_is_told_what_to_look_at() -> None:
    command: list[Any] = [sys.executable, "-m", "elastrain.launcher", "doctor", "train.py"]
    asked = warm.run(command, env=environment(), capture_output=True, text=True, timeout=180)
    assert asked.returncode == 2
    assert "--memory" in asked.stderr
