"""A micro-batch whose gradient comes out wrong on one member is computed anew before anything of it is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import Run, assert_equal_to_undisturbed, run_job

pytestmark = pytest.mark.slow
STEPS = ("--steps", "12")


def _noticed(run: Run) -> list[str]:
    return [e["noticed"] for e in run.events if e["event"] == "note" and "noticed" in e]


def _flip(member: str, step: int) -> str:
    return f"flip --target member:{member} --at step={step},phase=backward --where micro-batch"


@pytest.mark.parametrize("workers", [2, 3])
def test_a_bit_in_a_micro_batchs_own_gradient_is_put_right_and_the_member_is_named(
    tmp_path: Path, workers: int
) -> None:
    run = run_job(tmp_path, workers=workers, arguments=(*STEPS, "--audit", "all"), faults=[_flip("m1", 5)])
    assert_equal_to_undisturbed(run, *STEPS)
    assert set(run.digests) == {f"m{n}" for n in range(workers)}, "nobody leaves after one fault"
    assert any("of step 5 came out differently on" in each and "begins anew" in each for each in _noticed(run))
    assert any("of step 5 came out wrong on m1: " in each for each in _noticed(run)), _noticed(run)


def test_whose_gradients_are_wrong_twice_leaves_and_is_replaced(tmp_path: Path) -> None:
    arguments = ("--steps", "18", "--backups", "2")
    run = run_job(
        tmp_path, workers=3, arguments=(*arguments, "--audit", "all"), faults=[_flip("m1", 3), _flip("m1", 6)]
    )
    assert_equal_to_undisturbed(run, *arguments)
    assert "it is fault 2 of m1, whose machine should be looked at" in run.output
    assert "m1" not in run.digests


def test_one_run_in_every_so_many_steps_is_audited_and_no_bit_changes(tmp_path: Path) -> None:
    run = run_job(tmp_path, workers=3, arguments=(*STEPS, "--audit", "3"))
    assert_equal_to_undisturbed(run, *STEPS)
    audits = [
        (e["step"], e["run"], m, e["micro_batch"])
        for m, events in run.journals.items()
        for e in events
        if e["event"] == "audit"
    ]
    assert sorted({step for step, *_ in audits}) == [0, 3, 6, 9]
    assert len({(step, number, member) for step, number, member, _ in audits}) == 4
    assert {micro_batch // 2 - number for _, number, _, micro_batch in audits} == {0}, "whole runs of two micro-batches"
    assert not _noticed(run)
