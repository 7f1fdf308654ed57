"""Real workers are killed with SIGKILL in every phase of a step; the bits are those of the undisturbed job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow


def _kill(member: str, step: int, phase: str) -> str:
    return f"kill --target member:{member} --at step={step},phase={phase}"


@pytest.mark.parametrize(
    ("phases", "backups"),
    [
        (("forward", "backward", "reduce"), "1"),
        (("commit", "apply", "publish"), "1"),
        (("copy", "backward", "commit"), "2"),
        (("publish", "reduce", "apply"), "all"),
    ],
)
def test_three_of_four_die_one_after_another(tmp_path: Path, phases: tuple[str, ...], backups: str) -> None:
    arguments = ("--steps", "18", "--backups", backups)
    # The first kill leaves work for "copy" to strike at: the survivors copy what lost its backup.
    faults = [
        _kill(member, 4 + 6 * i, phase)
        for i, (member, phase) in enumerate(zip(("m1", "m2", "m0"), phases, strict=True))
    ]
    if phases[0] == "copy":
        faults[0] = _kill("m1", 4, "backward")
        faults[1] = "kill --target member:m2 --at phase=copy"
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert len(run.phases_struck()) == 3
    assert set(run.digests) >= {"m3"}


@pytest.mark.parametrize(
    ("phases", "backups"),
    [
        (("forward", "commit"), "1"),
        (("backward", "apply"), "0"),
        (("reduce", "publish"), "all"),
    ],
)
def test_members_that_die_in_the_very_first_step_are_replaced(
    tmp_path: Path, phases: tuple[str, str], backups: str
) -> None:
    arguments = ("--steps", "8", "--backups", backups)
    faults = [_kill(member, 0, phase) for member, phase in zip(("m0", "m1"), phases, strict=True)]
    run = run_job(tmp_path, workers=3, arguments=arguments, faults=faults)
    if backups != "all" and run.exit_code == 1:
        # Step 0 was committed by the third, and a state of it died with its only holder: of one that had a backup, the
        # first loss took that, and the second came before there was another.
        assert "are gone (m1); the last committed step is 0" in run.output
        return
    assert_equal_to_undisturbed(run, *arguments)
    assert len(run.phases_struck()) == 2


def test_only_member_that_dies_before_the_first_commit_begins_anew(tmp_path: Path) -> None:
    arguments = ("--steps", "6")
    run = run_job(tmp_path, workers=1, arguments=arguments, faults=[_kill("m0", 0, "backward")])
    assert_equal_to_undisturbed(run, *arguments)
    assert set(run.digests) == {"m1"}


def test_state_that_died_with_its_holders_ends_the_job_and_the_member_that_is_left_says_so(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "0")
    run = run_job(tmp_path, workers=2, arguments=arguments, faults=[_kill("m1", 5, "backward")])
    assert run.exit_code == 1
    assert "are gone (m1); the last committed step is" in run.output
    assert not run.digests


def test_a_second_member_dies_while_the_first_loss_is_recovered(tmp_path: Path) -> None:
    arguments = ("--steps", "8", "--backups", "2")
    faults = [_kill("m1", 5, "backward"), "kill --target member:m3 --at step=5,phase=report"]
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert {phase for _, _, phase in run.phases_struck()} == {"backward", "report"}


def test_an_owner_and_one_of_its_backups_die_in_the_same_step(tmp_path: Path) -> None:
    """Each shard has three of four holders: most that m1 owns are m2's too, and no commit changes that in between."""
    arguments = ("--steps", "8", "--backups", "2")
    faults = [_kill("m1", 5, "backward"), _kill("m2", 5, "backward")]
    run = run_job(tmp_path, workers=4, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    assert run.phases_struck() == [("m1", 5, "backward"), ("m2", 5, "backward")]


def test_members_come_back_and_one_dies_on_its_way_in(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "1")
    faults = [_kill("m1", 2, "commit"), "kill --target member:m2 --at phase=join"]
    run = run_job(tmp_path, workers=2, arguments=arguments, faults=faults, slow_until="m3")
    assert_equal_to_undisturbed(run, *arguments)
    assert [(member, phase) for member, _, phase in run.phases_struck()] == [("m1", "commit"), ("m2", "join")]
    assert "m3" in run.digests
    assert len([e for e in run.events if e["event"] == "view"]) >= 5


def test_a_death_at_the_very_end_loses_nothing(tmp_path: Path) -> None:
    arguments = ("--steps", "8")
    run = run_job(tmp_path, workers=3, arguments=arguments, faults=[_kill("m1", 8, "shutdown")])
    assert_equal_to_undisturbed(run, *arguments)
    assert run.phases_struck() == [("m1", 8, "shutdown")]
