"""What users get wrong, and what goes wrong by itself: one clear sentence, a true exit code, nothing left behind."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.training import (
    ROOT,
    SCRIPT,
    assert_equal_to_undisturbed,
    environment,
    run_job,
    undisturbed,
)

pytestmark = pytest.mark.slow

PREPARE = """
import torch, elastrain
from torch import nn
torch.set_num_threads(1)
{setup}
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = [torch.randn(4) for _ in range(10)]
loader_args = dict(global_batch_size=8, micro_batch_size=2, num_workers=0)
{change}
job = elastrain.init(seed=0)
loader = elastrain.DataLoader(data, **loader_args)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for step in job.steps(loader, until=2):
    for batch in step:
        {body}
"""
GOOD_BODY = "step.backward(model(batch).square().mean())"


def _alone(
    tmp_path: Path, *, setup: str = "", change: str = "", body: str = GOOD_BODY
) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "script.py"
    script.write_text(PREPARE.format(setup=setup, change=change, body=body))
    return warm.run(
        [sys.executable, str(script)], env=environment(), capture_output=True, text=True, timeout=360, cwd=ROOT
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("loader_args['micro_batch_size'] = 3", "micro"),
        ("optimizer = torch.optim.LBFGS(model.parameters())", "LBFGS needs a closure"),
        ("optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())", "not the model's"),
        ("for q in model.parameters(): q.requires_grad_(False)", "nothing to train"),
        ("model = model.to(torch.cfloat); optimizer = torch.optim.AdamW(model.parameters())", "complex64"),
        ("model = model.half(); optimizer = torch.optim.AdamW(model.parameters())", "loss_scale='dynamic'"),
        ("model.append(nn.SyncBatchNorm(4)); optimizer = torch.optim.SGD(model.parameters())", "over members"),
    ],
)
def test_what_cannot_be_prepared_is_refused_in_one_sentence(tmp_path: Path, change: str, sentence: str) -> None:
    done = _alone(tmp_path, change=change)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("elastrain: ") and sentence in last
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("pass", "without step.backward"),
        ("step.backward(model(batch))", "scalar loss"),
        ("with torch.no_grad(): step.backward(model(batch).sum())", "no_grad"),
        ("break", "left before it was committed"),
    ],
)
def test_a_loop_that_breaks_the_rules_is_told_so(tmp_path: Path, body: str, sentence: str) -> None:
    done = _alone(tmp_path, body=body)
    assert done.returncode == 1
    assert sentence in done.stderr.strip().splitlines()[-1]


def test_zero_grad_in_the_users_loop_does_no_harm(tmp_path: Path) -> None:
    assert _alone(tmp_path, body=f"optimizer.zero_grad(); {GOOD_BODY}").returncode == 0


def test_a_step_with_nan_is_committed_as_skipped_and_training_goes_on(tmp_path: Path) -> None:
    arguments = ("--steps", "12", "--nan-at", "5")
    run = run_job(tmp_path, workers=2, arguments=arguments, faults=["kill --target member:m1 --at step=5,phase=commit"])
    assert_equal_to_undisturbed(run, *arguments)
    passed = [e for e in run.journals["m0"] if e["event"] == "passed"]
    assert [e["step"] for e in passed if e["skipped"]] == [5]
    assert run.output.count("has moved no parameter") == 1
    assert "elastrain: step 5 has moved no parameter: its gradient is infinite or NaN (step.skipped)" in run.output
    assert undisturbed(*arguments).digests != undisturbed("--steps", "12").digests


def test_leaving_the_loop_early_on_all_members_ends_the_job_in_peace(tmp_path: Path) -> None:
    arguments = ("--steps", "12", "--break-at", "9")
    run = run_job(tmp_path, workers=2, arguments=arguments)
    assert_equal_to_undisturbed(run, *arguments)
    assert set(run.digests) == {"m0", "m1"}


def test_early_stopping_by_a_local_counter_ends_the_job_though_a_newcomer_counts_otherwise(tmp_path: Path) -> None:
    """Those who rightly stopped were failed, and the newcomer went on alone until the state was gone."""
    arguments = ("--steps", "40", "--patience", "20")
    kill = "kill --target member:m1 --at step=3,phase=backward"
    run = run_job(tmp_path, workers=3, arguments=arguments, faults=[kill], slow_until="m3")
    assert_equal_to_undisturbed(run, *arguments)
    assert set(run.digests) == {"m0", "m2", "m3"}
    ended = {m: max(e["step"] for e in events if e["event"] == "passed") for m, events in run.journals.items()}
    assert [ended[m] for m in ("m0", "m2", "m3")] == [19, 19, 19]
    # What the body of the newcomer's loop did for a step that does not count is undone.
    assert len(set(re.findall("digest .* lr .*", run.output))) == 1, run.output
    assert len([e for e in run.events if e["event"] == "restart"]) == 1


LOSES_A_LOADER = """
import os, pathlib, signal, sys
import torch, elastrain
torch.set_num_threads(1)
killed = pathlib.Path(sys.argv[1])

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == 17:
            try:
                killed.touch(exist_ok=False)  # of two that come to it at once, one dies
            except FileExistsError:
                return torch.randn(4)
            os.kill(os.getpid(), signal.SIGKILL)  # as the system does when memory is short
        return torch.randn(4)

job = elastrain.init(seed=0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = elastrain.DataLoader(Samples(), global_batch_size=16, micro_batch_size=2, num_workers=2)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for step in job.steps(loader, until=12):
    for batch in step:
        step.backward(model(batch).square().mean())
"""


def test_a_killed_loader_process_costs_nothing_but_its_restart(tmp_path: Path) -> None:
    """Out of memory kills them first; that ended the member, and a job of one."""
    script, before = tmp_path / "script.py", tmp_path / "before"
    script.write_text(LOSES_A_LOADER)
    before.touch()
    alone = undisturbed(str(before), script=script)
    run = run_job(tmp_path, workers=2, arguments=[str(tmp_path / "killed")], script=script)
    assert (alone.exit_code, run.exit_code) == (0, 0), alone.output + run.output
    assert set(run.digests.values()) == set(alone.digests.values())
    assert set(run.digests) == {"m0", "m1"}
    [died] = [e for events in run.journals.values() for e in events if e["event"] == "loader_died"]
    assert "was killed by SIGKILL" in died["reason"]
    assert run.output.count("it is started again") == 1


CHANGES_ONE_MEMBER = """
import os
import torch, elastrain
torch.set_num_threads(1)
job = elastrain.init(seed=0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = elastrain.DataLoader(torch.randn(64, 4), global_batch_size=8, micro_batch_size=2, num_workers=0)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for step in job.steps(loader, until=100):
    for batch in step:
        step.backward(model(batch).square().mean())
    if step.number == 5:
        if os.environ["ELASTRAIN_MEMBER"] == "m1":
            CHANGE
        break
"""


def test_parameters_changed_on_one_member_as_the_loop_ends_are_put_right_and_said(tmp_path: Path) -> None:
    """Autograd counts no version here, and no sample looks at this value: a flipped bit looks alike."""
    digests = []
    for number, change in enumerate(("model.weight.data[0, 1] += 1", "pass")):
        folder = tmp_path / str(number)
        folder.mkdir()
        script = folder / "script.py"
        script.write_text(CHANGES_ONE_MEMBER.replace("CHANGE", change))
        run = run_job(folder, workers=2, arguments=(), script=script)
        assert run.exit_code == 0, run.output
        assert ("m1 computes with other parameters of shard 0" in run.output) == (change != "pass"), run.output
        digests += run.digests.values()
    assert len(digests) == 4
    assert len(set(digests)) == 1


def test_a_job_whose_members_end_with_different_parameters_fails_and_names_them(tmp_path: Path) -> None:
    """The last net: what changes after members have compared their parameters, such as a bit in memory."""
    script = tmp_path / "script.py"
    script.write_text(
        CHANGES_ONE_MEMBER.replace("CHANGE", "job._prepared.parts.model.parameters_digest = lambda: 'feedfacefeedface'")
    )
    run = run_job(tmp_path, workers=2, arguments=(), script=script)
    assert run.exit_code == 1, run.output
    assert "the parameters at the end differ" in run.output
    assert all(f"{member} has " in run.output and digest in run.output for member, digest in run.digests.items())
    assert len(set(run.digests.values())) == 2


def test_a_users_bug_ends_the_job_with_its_traceback(tmp_path: Path) -> None:
    run = run_job(tmp_path, workers=3, arguments=("--steps", "30", "--raise-at", "6"))
    assert run.exit_code == 1
    assert "KeyError: 'a mistake in micro-batch 4" in run.output
    assert len([e for e in run.events if e["event"] == "failed"]) == 2, "a second member tried before the job ended"


def test_a_bug_before_the_first_commit_ends_the_job_at_once(tmp_path: Path) -> None:
    run = run_job(tmp_path, workers=2, arguments=("--steps", "30", "--raise-at", "0"))
    assert run.exit_code == 1
    assert "KeyError: 'a mistake" in run.output
    assert not [e for e in run.events if e["event"] == "restart"]


LINGERING = """
import atexit, os, pathlib, sys, time
import torch, elastrain
from torch import nn
torch.set_num_threads(1)
went_on = pathlib.Path(sys.argv[1])
job = elastrain.init(seed=0)
model = nn.Linear(4, 4)
loader = elastrain.DataLoader([torch.randn(4) for _ in range(40)], global_batch_size=8, micro_batch_size=2)
model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)

def linger():
    until = time.monotonic() + 30
    while not went_on.exists() and time.monotonic() < until:
        time.sleep(0.01)
    print("lingered until the others had gone on:", went_on.exists(), flush=True)

def fail(where, step):
    if os.environ.get("ELASTRAIN_MEMBER") == "m1" and step.number == 2 and where == sys.argv[2]:
        atexit.register(linger)
        if sys.argv[3] == "exit":
            sys.exit(3)
        raise KeyError("a mistake of one member")

for step in job.steps(loader, until=6):
    for batch in step:
        fail("within", step)
        step.backward(model(batch).square().mean())
    fail("after", step)
    if step.number == 4:
        went_on.touch()
"""


@pytest.mark.parametrize(("where", "how"), [("within", "raise"), ("after", "raise"), ("after", "exit")])
def test_nobody_waits_for_a_member_that_failed_within_or_after_a_step(tmp_path: Path, where: str, how: str) -> None:
    """Neither for its interpreter: what runs at exit may take long, torch alone takes most of a second."""
    script = tmp_path / "lingering.py"
    script.write_text(LINGERING)
    arguments = [str(tmp_path / "on"), where, how]
    run = run_job(tmp_path, workers=2, script=script, arguments=arguments, options=["--max-restarts", "0"])
    assert_equal_to_undisturbed(run, *arguments, script=script)
    assert "lingered until the others had gone on: True" in run.output
    assert ("KeyError: 'a mistake of one member'" in run.output) is (how == "raise")
    assert ("left here before step 3, but m0 went on" in run.output) is (where == "after")
    assert "Exception ignored" not in run.output


def test_losing_all_holders_is_said_and_nothing_is_invented(tmp_path: Path) -> None:
    run = run_job(
        tmp_path,
        workers=2,
        arguments=("--steps", "24", "--backups", "0"),
        faults=["kill --target member:m1 --at step=5,phase=backward"],
    )
    assert run.exit_code == 1
    assert "are gone (m1)" in run.output, run.output
    assert "durable checkpoint" in run.output


@pytest.mark.parametrize("length", ["1", "3", "10"])
def test_every_run_length_gives_the_same_bits_for_any_number_of_workers(tmp_path: Path, length: str) -> None:
    arguments = ("--steps", "6", "--run-length", length)
    assert_equal_to_undisturbed(run_job(tmp_path, workers=3, arguments=arguments), *arguments)


def test_a_member_with_other_settings_is_refused_by_name(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    text = SCRIPT.read_text().replace("seed=7", "seed=7 + (__import__('os').environ['ELASTRAIN_MEMBER'] == 'm1')")
    odd.write_text(text)
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--nproc-per-node", "2"]
    command += ["--run-dir", str(tmp_path / "run"), str(odd), "--steps", "5"]
    done = warm.run(command, env=environment(), capture_output=True, text=True, timeout=360)
    assert done.returncode != 0
    assert "seed" in done.stderr + done.stdout


def test_members_whose_hyperparameters_drift_apart_stop(tmp_path: Path) -> None:
    odd = tmp_path / "odd.py"
    lagging = (
        "if step.number != 8 or __import__('os').environ['ELASTRAIN_MEMBER'] == 'm0':\n            scheduler.step()"
    )
    odd.write_text(SCRIPT.read_text().replace("scheduler.step()", lagging))
    command = [sys.executable, "-m", "elastrain.launcher", "run", "--nproc-per-node", "2"]
    command += ["--run-dir", str(tmp_path / "run"), str(odd), "--steps", "30"]
    done = warm.run(command, env=environment(), capture_output=True, text=True, timeout=360)
    assert done.returncode == 1
    assert "with different lr of the optimizer" in done.stderr + done.stdout
