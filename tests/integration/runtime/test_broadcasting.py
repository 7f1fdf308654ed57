"""Real workers broadcast in each step: the sender is killed, members join, and mistakes are one sentence."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.training import SCRIPTS, Run, run_job, undisturbed

pytestmark = pytest.mark.slow

SCRIPT = SCRIPTS / "broadcasting_training.py"
WHERE = "between two steps in the body of the loop over job.steps(…)"


def kept(run: Run) -> set[str]:
    return set(re.findall(r"kept (\[.*\])$", run.output, re.MULTILINE))


@pytest.mark.parametrize(("victim", "rank"), [("m0", 0), ("m2", 2)])
def test_with_the_sender_killed_all_have_the_values_of_a_job_of_one(tmp_path: Path, victim: str, rank: int) -> None:
    told = ("--kill", victim, "--from-rank", str(rank))
    job = run_job(tmp_path, workers=3, script=SCRIPT, arguments=told, options=("--max-restarts", "2"))
    assert job.exit_code == 0, job.output
    assert f"{victim} ended by SIGKILL" in job.output
    alone = undisturbed(script=SCRIPT)
    assert len(kept(job)) == 1, job.output
    assert (kept(job), set(job.digests.values())) == (kept(alone), set(alone.digests.values()))


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (("--no-data=value",), r"the value of job.broadcast\(…\)\['fn'\]\[1\] is a builtins.object, which cannot be"),
        (("--no-data=function",), r"the value of job.broadcast\(…\)\['fn'\]\[1\] is a builtins.function, which"),
        (("--from-rank=2",), r"from_rank of job.broadcast\(…\) must be a whole number from 0 to 1.*; got 2"),
        (("--only-main",), r"job.broadcast\(…, from_rank=0\) was called on m0 after step -1, and m1 has gone on to"),
        (("--mixed",), r"was called on one member and job.* on m\d: call the same on all members, with the same data"),
    ],
)
def test_what_cannot_be_broadcast_ends_the_job_with_one_sentence(
    tmp_path: Path, told: tuple[str, ...], sentence: str
) -> None:
    job = run_job(tmp_path, workers=2, script=SCRIPT, arguments=told, options=("--max-restarts", "0"))
    assert job.exit_code != 0
    assert re.search(sentence, job.output), job.output


@pytest.mark.parametrize(
    ("place", "sentence"),
    [
        ("before", f"job.broadcast(…) was called before the loop: call it {WHERE}"),
        ("within", f"job.broadcast(…) was called in the middle of step 0: call it {WHERE}"),
        ("behind", f"job.broadcast(…) was called behind the loop, where members are alone: call it {WHERE}"),
    ],
)
def test_a_broadcast_at_another_place_is_one_sentence(place: str, sentence: str) -> None:
    job = undisturbed("--place", place, script=SCRIPT)
    assert job.exit_code != 0
    assert sentence in job.output
