"""Scripts that save and load the optimizer's state themselves, as plain PyTorch does, with kills on the way."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import elastrain
from tests.support.training import SCRIPTS, Run, run_job, undisturbed

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "saving_training.py"
STEPS = 6
IMPORTS = "import os\nimport signal\nimport time\n"
WAITS = """
    while step.number == 0 and job.member in ("m0", "m2") and not (args.out / "m3").exists():
        time.sleep(0.1)
    if job.member == "m2":
        time.sleep(2.0)
        os.kill(os.getpid(), signal.SIGKILL)
    if job.member == "m0":
        time.sleep(3.0)
    for batch in step:
"""
"""A loop that gets its third member lost in the first step, once the replacement of its second one is there."""


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
    # In the only pipeline no member reads what another one updates, so nothing is published.
    last = "publish" if stages == 1 else "commit"
    faults = ["kill --target member:m1 --at step=2,phase=forward", f"kill --target member:m0 --at step=4,phase={last}"]
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


def test_a_replacement_joins_although_the_file_was_overwritten_that_its_script_loads(tmp_path: Path) -> None:
    saved, steps = tmp_path / "saved", 16
    saved.mkdir()
    whole = ("--steps", str(steps))
    undisturbed(*whole, "--out", str(saved), script=SCRIPT)
    goes_on = tmp_path / "goes_on.py"
    text = SCRIPT.read_text()
    for old, new in (
        ("import os\n", "import os\nimport time\n"),
        ('args.out / f"{step}.pt"', "args.load"),
        ("def load()", "counts = {'saved': 0}\njob.register('counts', counts)\n\n\ndef load()"),
        ("    for name, part", "    counts['saved'] = saved['scheduler']['last_epoch']\n    for name, part"),
        (
            "    scheduler.step()\n",
            "    scheduler.step()\n    counts['saved'] += 1\n    entered = args.out / 'entered'\n"
            "    if job.member == 'm2':\n        entered.touch()\n"
            "    time.sleep(0.3 * (step.number > 1 and not entered.exists()))\n",
        ),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    goes_on.write_text(text + "\nassert counts['saved'] == scheduler.last_epoch, (counts, scheduler.last_epoch)\n")
    told = ("--steps", str(steps - 1), "--load", str(saved / "0.pt"), "--out", str(saved))
    faults = ["kill --target member:m1 --at step=1,phase=backward"]
    job = run_job(tmp_path, workers=2, script=goes_on, arguments=told, faults=faults, options=("--max-restarts", "2"))
    assert job.exit_code == 0, job.output
    assert "refused" not in job.output
    assert job.digests == {"m0": alone(*whole), "m2": alone(*whole)}


def test_a_replacement_that_takes_part_in_the_first_step_must_have_loaded_what_the_others_have(tmp_path: Path) -> None:
    """The second loss lets the replacement of the first one into the first step."""
    saved = tmp_path / "saved"
    saved.mkdir()
    undisturbed("--steps", "2", "--out", str(saved), script=SCRIPT)
    odd, loads, begins = tmp_path / "odd.py", "def load() -> None:\n", "for step in job.steps("
    text = SCRIPT.read_text().replace("init(seed=3)", "init(seed=3, backups=0)").replace("import os\n", IMPORTS)
    text = text.replace(loads, loads + "    args.load = args.out / ('1.pt' if job.member == 'm3' else '0.pt')\n")
    text = text.replace(begins, f"(args.out / job.member).touch()\n{begins}").replace("    for batch in step:\n", WAITS)
    odd.write_text(text)
    told = ("--steps", "3", "--load", str(saved / "0.pt"), "--out", str(saved))
    faults = ["kill --target member:m1 --at step=0,phase=forward"]
    job = run_job(tmp_path, workers=3, script=odd, arguments=told, faults=faults, options=("--max-restarts", "2"))
    assert job.exit_code == 1, job.output
    assert "members entered step 0 with different" in job.output
    assert "optimizer state that the script loaded" in job.output


def test_of_a_checkpoint_and_the_scripts_own_file_the_newer_one_is_taken(tmp_path: Path) -> None:
    saved, place = tmp_path / "saved", str(tmp_path / "checkpoints")
    saved.mkdir()
    whole = ("--steps", str(STEPS + 1))
    undisturbed(*whole, "--out", str(saved), script=SCRIPT)
    first = run(
        tmp_path / "first", "--steps", "3", workers=1, options=("--checkpoint-dir", place, "--checkpoint-every", "3")
    )
    assert first.exit_code == 0, first.output
    for file, steps, sentence in (
        ("0", "7", "step 3 begins from the job's checkpoint, not from the optimizer state that the script loaded: the"),
        ("4", "5", "step 3 begins from the optimizer state and the parameters that the script loaded, which have made"),
    ):
        told = ("--steps", steps, "--load", str(saved / f"{file}.pt"))
        job = run(tmp_path / file, *told, workers=2, options=("--resume", place))
        assert job.exit_code == 0, job.output
        assert job.output.count(sentence) == 1, job.output
        assert set(job.digests.values()) == {alone(*whole)}


def test_in_a_later_life_the_jobs_own_checkpoint_counts_although_the_scripts_file_is_newer(tmp_path: Path) -> None:
    saved, place = tmp_path / "saved", str(tmp_path / "checkpoints")
    saved.mkdir()
    whole = ("--steps", "12")
    undisturbed(*whole, "--out", str(saved), script=SCRIPT)
    lives = tmp_path / "lives.py"
    text = SCRIPT.read_text().replace('args.out / f"{step}.pt"', "args.load")
    lives.write_text(text.replace("init(seed=3)", "init(seed=3, backups=0)"))
    told = ("--steps", "11", "--load", str(saved / "0.pt"), "--out", str(saved))
    options = ("--checkpoint-dir", place, "--checkpoint-every", "3", "--max-restarts", "4")
    faults = ["kill --target member:m1 --at step=8,phase=backward"]
    job = run_job(tmp_path, workers=2, script=lives, arguments=told, faults=faults, options=options)
    assert job.exit_code == 0, job.output
    assert "not from the optimizer state that the script loaded" in job.output
    assert set(job.digests.values()) == {alone(*whole)}


def test_a_state_that_a_script_has_does_not_change_with_the_training() -> None:
    """The holder's own state goes straight into the script's tensors, and none of it is shared: scalars, too."""
    job = elastrain.init(seed=3)
    model = nn.Linear(4, 3)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    samples: Any = list(torch.randn(16, 4))
    loader = elastrain.DataLoader(samples, global_batch_size=4, micro_batch_size=2, num_workers=0)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for step in job.steps(loader, until=4):
        for batch in step:
            step.backward(model(batch).square().mean())
        state = optimizer.state_dict()
        kept.append((state, deepcopy(state)))
    for number, (state, before) in enumerate(kept, 1):
        assert all(entry["step"] == number for entry in state["state"].values())
        assert_equal(state, before)
