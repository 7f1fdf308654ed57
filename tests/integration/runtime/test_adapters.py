"""Scripts of transformers and accelerate train in a job and are killed: all bits and logs are a job of one's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import in_sessions
from tests.support.training import SCRIPTS, Run, environment, run_job, undisturbed

pytestmark = pytest.mark.slow
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'elastrain[integrations]'")
pytest.importorskip("transformers", reason="transformers is not installed")

TRAINER = SCRIPTS / "trainer_training.py"
ACCELERATOR = SCRIPTS / "accelerator_training.py"
SAVING = ("kill --target member:m0 --at step=4,phase=publish", "kill --target member:m1 --at step=2,phase=backward")


def told(output: str) -> set[str]:
    """The trainer's lines of its history, without the first words of the member that told them."""
    return set(re.findall(r"line \[.*\]", output)) | set(re.findall(r"best .*", output))


def rows(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "run"} for line in found]


def state_of(file: Path) -> bytes:
    """The optimizer's state and groups in a file of the library, as bytes that are equal if all bits are."""
    found = torch.load(file, weights_only=True)
    text = repr([(number, sorted(state)) for number, state in found["state"].items()]) + repr(found["param_groups"])
    tensors = [value.numpy().tobytes() for state in found["state"].values() for _, value in sorted(state.items())]
    return b"".join([text.encode(), *tensors])


@pytest.mark.parametrize("more", [(), ("--more", "smooth=0.1", "--more", "bf16=1")], ids=["plain", "smoothed-bf16"])
def test_a_trainer_survives_kills_with_the_bits_and_the_history_of_a_job_of_one(
    tmp_path: Path, more: tuple[str, ...]
) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), *more, script=TRAINER)
    assert alone.exit_code == 0, alone.output
    arguments = ("--out", str(tmp_path / "job"), *more)
    done = run_job(tmp_path, workers=3, arguments=arguments, faults=SAVING, script=TRAINER)
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 2
    assert set(done.digests.values()) == set(alone.digests.values())
    assert told(done.output) == told(alone.output)
    folders = {path.name for path in (tmp_path / "job").glob("checkpoint-*")}
    assert folders == {path.name for path in (tmp_path / "one").glob("checkpoint-*")}
    for name in folders:
        one, job = tmp_path / "one" / name, tmp_path / "job" / name
        assert state_of(job / "optimizer.pt") == state_of(one / "optimizer.pt")
        assert (job / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()


@pytest.mark.parametrize("more", [(), ("--more", "smooth=0.1")], ids=["plain", "smoothed"])
def test_a_trainer_computes_what_the_library_computes(tmp_path: Path, more: tuple[str, ...]) -> None:
    """One epoch in order and without dropout. The library adds up gradients in another order."""
    arguments = ("--steps", "6", "--more", "order=sequential", *more)
    ours = undisturbed("--out", str(tmp_path / "one"), *arguments, script=TRAINER)
    plain = undisturbed("--out", str(tmp_path / "two"), "--plain", *arguments, script=TRAINER)
    assert ours.exit_code == plain.exit_code == 0, ours.output + plain.output
    figures = [
        [
            float(each)
            for each in re.findall(r"\('(?:loss|eval_loss|grad_norm|learning_rate)', ([\d.e-]+)\)", run.output)
        ]
        for run in (ours, plain)
    ]
    assert len(figures[0]) > 20 and figures[0] == pytest.approx(figures[1], rel=2e-4)


def test_a_trainer_resumes_from_its_checkpoint_behind_the_data_that_was_used(tmp_path: Path) -> None:
    first = undisturbed("--out", str(tmp_path / "one"), script=TRAINER)
    assert first.exit_code == 0, first.output
    begun = str(tmp_path / "one" / "checkpoint-8")
    arguments = ("--out", str(tmp_path / "two"), "--resume", begun)
    alone = undisturbed(*arguments, script=TRAINER)
    done = run_job(tmp_path, workers=2, arguments=("--out", str(tmp_path / "three"), *arguments[2:]), script=TRAINER)
    assert alone.exit_code == done.exit_code == 0, alone.output + done.output
    assert set(done.digests.values()) == set(alone.digests.values())
    assert "('step', 12)" in alone.output


def test_a_script_of_accelerate_survives_kills_with_the_bits_and_the_log_of_a_job_of_one(tmp_path: Path) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), script=ACCELERATOR)
    assert alone.exit_code == 0, alone.output
    done = run_job(tmp_path, workers=3, arguments=("--out", str(tmp_path / "job")), faults=SAVING, script=ACCELERATOR)
    assert done.exit_code == 0, done.output
    assert len(done.phases_struck()) == 2
    assert set(done.digests.values()) == set(alone.digests.values())
    assert rows(tmp_path / "job/log.jsonl") == rows(tmp_path / "one/log.jsonl")
    names = {path.name for path in (tmp_path / "job").glob("step_*")}
    assert names == {"step_24", "step_48", "step_72"}
    for name in names:
        one, job = tmp_path / "one" / name, tmp_path / "job" / name
        assert state_of(job / "optimizer.bin") == state_of(one / "optimizer.bin")
        assert (job / "model.safetensors").read_bytes() == (one / "model.safetensors").read_bytes()


def test_a_member_that_joins_later_counts_as_the_others_do(tmp_path: Path) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), script=ACCELERATOR)
    faults = (*SAVING, "kill --target member:m2 --at step=16,phase=forward")
    arguments = ("--out", str(tmp_path / "job"), "--linger", "3")
    done = run_job(tmp_path, workers=3, arguments=arguments, faults=faults, script=ACCELERATOR)
    assert done.exit_code == 0, done.output
    assert set(done.digests.values()) == set(alone.digests.values())
    assert rows(tmp_path / "job/log.jsonl") == rows(tmp_path / "one/log.jsonl")


def test_a_script_of_accelerate_resumes_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    first = undisturbed("--out", str(tmp_path / "one"), "--epochs", "2", script=ACCELERATOR)
    assert first.exit_code == 0, first.output
    more = ("--epochs", "3", "--resume", str(tmp_path / "one/step_48"))
    alone = undisturbed("--out", str(tmp_path / "two"), *more, script=ACCELERATOR)
    done = run_job(tmp_path, workers=2, arguments=("--out", str(tmp_path / "job"), *more), script=ACCELERATOR)
    assert alone.exit_code == done.exit_code == 0, alone.output + done.output
    assert set(done.digests.values()) == set(alone.digests.values())
    assert "ended overall 72" in alone.output


def test_clipping_that_the_job_does_not_know_of_is_refused(tmp_path: Path) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), "--lose-clip", script=ACCELERATOR)
    assert alone.exit_code == 1
    assert "say Accelerator(max_grad_norm=1.0) as well" in alone.output


def shares(run: Run) -> list[int]:
    """The forwards of evaluations that each member has computed, if it has lived to the end."""
    return [int(count) for count in re.findall(r"m\d+ evaluated (\d+)", run.output)]


@pytest.mark.parametrize(
    ("script", "more"),
    [(ACCELERATOR, ()), (TRAINER, ("--more", "metrics=1")), (TRAINER, ("--more", "own=1"))],
    ids=["accelerate", "predictions", "an own loss"],
)
@pytest.mark.parametrize("victim", ["m0", "m1"])
def test_evaluations_are_shared_and_equal_a_job_of_one_with_a_member_killed_on_the_way(
    tmp_path: Path, script: Path, more: tuple[str, ...], victim: str
) -> None:
    alone = undisturbed("--out", str(tmp_path / "one"), *more, script=script)
    arguments = ("--out", str(tmp_path / "job"), *more, "--kill-evaluating", victim)
    done = run_job(tmp_path, workers=3, arguments=arguments, script=script, options=("--max-restarts", "0"))
    assert alone.exit_code == done.exit_code == 0, alone.output + done.output
    assert f"{victim} ended by SIGKILL" in done.output
    assert set(done.digests.values()) == set(alone.digests.values())
    if script is TRAINER:
        assert told(done.output) == told(alone.output)
        assert len(told(done.output)) > 12
    else:
        assert rows(tmp_path / "job/log.jsonl") == rows(tmp_path / "one/log.jsonl")
    (whole,) = shares(alone)
    assert len(shares(done)) == 2
    # Not half each: a fast member computes more of them, a trainer evaluates once more behind the loop, as a whole, and
    # each loop begins with a trial.
    assert max(shares(done)) < whole


REFUSED = {
    "accelerate": "from elastrain.integrations.accelerate import Accelerator\nAccelerator(deepspeed_plugin=object())",
    "transformers": (
        "import transformers\nfrom elastrain.integrations.transformers import Trainer\n"
        "args = transformers.TrainingArguments(output_dir='out', torch_empty_cache_steps=1, use_cpu=True)\n"
        "Trainer(torch.nn.Linear(1, 1), args)"
    ),
    "lightning": (
        "import lightning\nfrom elastrain.integrations.lightning import ElastrainStrategy\n"
        "class Model(lightning.LightningModule):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.automatic_optimization = False\n"
        "    def training_step(self, batch, index): ...\n"
        "    def configure_optimizers(self): ...\n"
        "trainer = lightning.Trainer(strategy=ElastrainStrategy(), accelerator='cpu', logger=False)\n"
        "trainer.fit(Model(), torch.utils.data.DataLoader([torch.zeros(1)]))"
    ),
}


@pytest.mark.parametrize("library", list(REFUSED))
def test_an_adapter_that_refuses_leaves_nothing_behind(tmp_path: Path, library: str) -> None:
    """No process, no file of a run, and no memory with a name."""
    memory = set(Path("/dev/shm").iterdir())
    env = environment(ELASTRAIN_HOME=str(tmp_path / "home"))
    command = [sys.executable, "-c", "import torch\n" + REFUSED[library]]
    process = subprocess.Popen(
        command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    said = process.communicate(timeout=360)[1]
    assert process.returncode == 1 and ("elastrain: " in said or "ConfigError: " in said), said
    assert not in_sessions([process.pid])
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []
    assert not [path for path in set(Path("/dev/shm").iterdir()) - memory if str(process.pid) in path.name]
