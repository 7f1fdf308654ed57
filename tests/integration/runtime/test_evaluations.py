"""Members that evaluate together: one is killed on the way, another joins, and mistakes are one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.training import SCRIPTS, Run, run_job, undisturbed

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "evaluating_training.py"


def sums(run: Run) -> set[str]:
    return set(re.findall(r"sums (\[.*\])$", run.output, re.MULTILINE))


def computed(run: Run) -> dict[str, int]:
    return {m: int(count) for m, count in re.findall(r"(m\d+) computed (\d+)", run.output)}


def alone() -> tuple[set[str], set[str]]:
    run = undisturbed("--steps", "4", script=SCRIPT)
    assert len(sums(run)) == 1, run.output
    return sums(run), set(run.digests.values())


@pytest.mark.parametrize("victim", ["m1", "m0"])
def test_with_a_member_killed_on_the_way_the_sums_are_those_of_a_job_of_one(tmp_path: Path, victim: str) -> None:
    told = ("--steps", "4", "--kill", victim, "--batch-s", "0.05")
    job = run_job(tmp_path, workers=4, script=SCRIPT, arguments=told, options=("--max-restarts", "2"))
    assert job.exit_code == 0, job.output
    assert f"{victim} ended by SIGKILL" in job.output
    assert (sums(job), set(job.digests.values())) == alone()
    shared = computed(job)
    assert len(shared) >= 3
    # 29 batches behind the loop, on each member; and of those before it, no member has had all.
    assert all(29 <= count < 29 + 5 * 29 for count in shared.values())


@pytest.mark.parametrize("victim", ["m1", "m0"])
def test_outputs_of_batches_come_in_order_and_once_with_a_member_killed_on_the_way(tmp_path: Path, victim: str) -> None:
    told = ("--steps", "3", "--predict")
    lone = undisturbed(*told, script=SCRIPT)
    told = (*told, "--kill-predicting", victim, "--batch-s", "0.05")
    job = run_job(tmp_path, workers=3, script=SCRIPT, arguments=told, options=("--max-restarts", "2"))
    assert job.exit_code == lone.exit_code == 0, job.output + lone.output
    assert f"{victim} ended by SIGKILL" in job.output
    # A newcomer may have come behind the last step, and has fewer outputs then.
    found = [set(re.findall(r"outputs (\[.*,.*\])$", run.output, re.MULTILINE)) for run in (job, lone)]
    assert found[0] == found[1]
    assert len(found[0]) == 1
    assert set(job.digests.values()) == set(lone.digests.values())
    shares = [int(count) for count in re.findall(r"predicted (\d+)", job.output)]
    assert len(shares) >= 2
    assert max(shares) < 3 * 29  # of three loops of 29 batches


@pytest.mark.parametrize(
    ("workers", "stages", "victim"),
    [(4, 2, "m1"), (3, 3, "m0"), (3, 3, "m2")],
    ids=["two pipelines", "the collector and first of three", "the last of three"],
)
def test_batches_go_through_pipelines_and_lost_ones_go_again(
    tmp_path: Path, workers: int, stages: int, victim: str
) -> None:
    told = ("--steps", "4", "--kill", victim, "--batch-s", "0.05")
    options = ("--max-restarts", "2", "--stages", str(stages))
    job = run_job(tmp_path, workers=workers, script=SCRIPT, arguments=told, options=options)
    assert job.exit_code == 0, job.output
    assert f"{victim} ended by SIGKILL" in job.output
    assert sums(job) == alone()[0]
    held = [e["blocks"] for events in job.journals.values() for e in events if e["event"] == "holds"]
    assert min(map(len, held)) < max(map(len, held))  # no member had the whole model


def test_a_healthy_evaluation_is_not_killed_however_long_it_takes(tmp_path: Path) -> None:
    """A member that stands still for 30 s between two steps is taken to hang; here the others wait for 35 s."""
    job = run_job(tmp_path, workers=2, script=SCRIPT, arguments=("--steps", "4", "--long-s", "35"))
    assert job.exit_code == 0, job.output
    assert not [e for e in job.events if e["event"] in ("kill", "replace", "stacks")]
    assert (sums(job), set(job.digests.values())) == alone()


def test_what_fn_raises_ends_the_job_with_the_error_of_the_script(tmp_path: Path) -> None:
    job = run_job(tmp_path, workers=2, script=SCRIPT, arguments=("--raises",))
    assert job.exit_code == 1
    assert "ValueError: a bad sample" in job.output
    assert "in fn\n" in job.output  # the traceback
    sentence = (
        r"evaluating_training.py:\d+: fn of job.evaluate\(…\) raised on m\d for batch 14: ValueError: a bad sample"
    )
    assert len(re.findall(sentence, job.output)) == 1, job.output


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (
            "--only-main",
            r"job.evaluate\(…\) was called on m0 after step -1, and m1 has gone on to step 0 without it: "
            "call it on all members alike",
        ),
        (
            "--shorter-on=m1",
            r"job.evaluate\(…\) on 20[03] samples in batches of 7 was called on one member and job.evaluate\(…\) on "
            r"20[03] samples in batches of 7 on m\d: call the same on all members, with the same data",
        ),
    ],
)
def test_members_that_evaluate_otherwise_are_one_sentence(tmp_path: Path, told: str, sentence: str) -> None:
    job = run_job(tmp_path, workers=2, script=SCRIPT, arguments=(told,), options=("--max-restarts", "0"))
    assert job.exit_code != 0
    assert re.search(sentence, job.output), job.output


def test_what_cannot_be_evaluated_is_refused_by_name_and_training_goes_on() -> None:
    job = undisturbed(script=SCRIPTS / "refused_evaluations.py")
    assert job.exit_code == 0, job.output
    found = dict(line.split(": ", 1) for line in job.output.splitlines() if ": " in line)
    where = "between two steps in the body of the loop over job.steps(…)"
    assert found.keys() >= {"before the loop", "in a step"}
    for name, words in {
        "before the loop": f"was called before the loop: call it {where}",
        "no function": "fn of job.evaluate(…) must be callable; got int",
        "stream": "takes a dataset with __getitem__ and __len__; got list_iterator",
        "empty": "has no samples",
        "batch size": "must be a whole number from 1 on; got 0",
        "no dict": "must return a dict of sums by name, such as {'correct': n}; got tensor",
        "no number": "returned 'much' as 'what': return real numbers",
        "too many": "returned 131072 numbers for batch 0; at most 65536 travel",
        "nested": "was called by the fn of job.evaluate(…): call one after the other",
        "other names": "returned 'first' for batch 0 and 'rest' for batch 1",
        "in a step": f"was called in the middle of step 0: call it {where}",
    }.items():
        assert words in found[name], (name, found[name])
    assert re.search(r"^sums -?\d+\.\d+$", job.output, re.MULTILINE)
