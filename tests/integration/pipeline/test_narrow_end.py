"""Memory limits that leave no room for the whole model at the end: rank 0 has it, others keep their own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.training import SCRIPTS, Run, looked_at_by_many, run_job, undisturbed

SCRIPT = SCRIPTS / "narrow_end_training.py"
MIB = 1 << 20
ARGUMENTS = ("--steps", "5")
KEPT_MIB = 625
"""What the script of the member in question keeps from some step on: more than its first steps take besides."""

pytestmark = pytest.mark.slow


def trained(folder: Path, member: str, limit_mib: int, *faults: str) -> Run:
    """One pipeline of four. `member` has the limit, all others have none."""
    arguments = (*ARGUMENTS, "--limit", f"{member}={limit_mib}", "--keeps", f"{member}={KEPT_MIB}", "--keeps-from", "3")
    options = ("--stages", "4", "--max-restarts", "0")
    return run_job(folder, workers=4, script=SCRIPT, arguments=arguments, options=options, faults=faults)


def rooms(run: Run, member: str) -> list[dict[str, Any]]:
    return [event for event in run.journals[member] if event["event"] == "room"]


def ended(run: Run, member: str) -> dict[str, str]:
    """What the member's script was given of the whole model."""
    lines = (run.folder / f"ended-{member}.txt").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


def too_small_mib() -> int:
    """A limit that leaves no room for all blocks, and enough for what four members, or three, compute."""

    def ample(folder: Path) -> Run:
        return trained(folder, "m2", 64 << 10)

    return below_the_end_of(looked_at_by_many("ample room for the end", ample), "m2")


def below_the_end_of(run: Run, member: str) -> int:
    """A limit below what the member needed at the end of this run."""
    last = rooms(run, member)[-1]
    # Each holds every shard, three of four as a backup, which is twice, or two of three. Its own blocks are a quarter
    # of the model, and half of it while holders move after a loss.
    return int((last["need_base_bytes"] + 2.17 * last["need_parameters_bytes"]) // MIB)


def narrow(folder: Path, member: str, *faults: str) -> Run:
    """A run in which the member lacks room at the end.

    What it holds besides differs by 100 MiB between runs on a busy machine, which is more than a limit may be off. So a
    run that has fitted tells the limit of the next one.
    """
    limit_mib = too_small_mib()
    for number in range(4):
        (folder / str(number)).mkdir()
        run = trained(folder / str(number), member, limit_mib, *faults)
        if run.exit_code or not run.digests[member]:
            break
        limit_mib = below_the_end_of(run, member)
    return run


KILLED = pytest.param(("kill --target member:m0 --at step=5,phase=shutdown",), marks=pytest.mark.on_demand)
FAULTS = [(), KILLED]


# Where the first is lost, the second has rank 0 then.
@pytest.mark.parametrize("faults", FAULTS)
def test_a_member_without_room_for_the_whole_model_keeps_its_own_blocks(tmp_path: Path, faults: Sequence[str]) -> None:
    run = narrow(tmp_path, "m2", *faults)
    (digest,) = undisturbed(*ARGUMENTS, script=SCRIPT).digests.values()
    assert run.exit_code == 0, run.output
    assert run.digests == {**({} if faults else {"m0": digest}), "m1": digest, "m2": "", "m3": digest}
    whole, partial = ended(run, "m1"), ended(run, "m2")
    assert whole["digest"] == digest and whole["state"] == "52"
    assert partial["rank"] == ("1" if faults else "2")
    sentences = dict.fromkeys(("digest", "state"), "the whole model is on rank 0, so use it there")
    for what, sentence in {**sentences, "evaluated": "on rank 0 (if job.rank == 0), which has all blocks"}.items():
        assert partial[what].startswith("refused: ") and sentence in partial[what]
    held = [event["parameters_bytes"] for event in run.journals["m2"] if event["event"] == "holds"]
    assert held[-1] < 70 * MIB < [e for e in run.journals["m1"] if e["event"] == "holds"][-1]["parameters_bytes"]


@pytest.mark.parametrize("faults", FAULTS)
def test_rank_0_without_room_ends_the_job_with_a_sentence(tmp_path: Path, faults: Sequence[str]) -> None:
    member = "m1" if faults else "m0"
    run = narrow(tmp_path, member, *faults)
    assert run.exit_code == 1
    assert f"member {member}: a member's memory limit is" in run.output
    assert "at the end of the loop rank 0, which this member is, takes the parameters of all blocks" in run.output
    assert "Traceback" not in run.output
    assert not set(run.digests.values()) - {""}
