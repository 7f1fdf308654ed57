"""Whole schedules of pipelines: the weights are those of one worker, and each broken rule is found."""

from __future__ import annotations

from collections import Counter

import pytest

from elastrain.pipeline import actions, redo
from tests.sim.pipelines.job import PipelineJob

SCHEDULES = 1640
"""In the test run; `-m on_demand` plays more."""
PLANTS = (
    "makers keep nothing",
    "another copy has other bits",
    "added a second time",
    "contribution of another micro-batch",
    "no autocast when repeated",
    "run resumed in its middle",
    "stale parameters",
    "task before its publish",
    "replicas without a commit",
    "plan without a record",
)


def outcomes(seeds: range, plant: str = "") -> Counter[str]:
    return Counter(PipelineJob(seed, plant).play() for seed in seeds)


def first_found(plant: str, within: int = 200) -> str:
    """How the first schedule ends that shows the plant; `ok` where none does."""
    for seed in range(within):
        try:
            end = PipelineJob(seed, plant).play()
        except ValueError:
            # A stretch that begins where no member's blocks begin can be handed to nobody.
            return "nobody can compute it"
        if end != "ok":
            return end
    return "ok"


def test_losses_and_joins_at_any_point_show_in_no_weight_and_nobody_waits_for_ever() -> None:
    over = idly = 0
    for seed in range(SCHEDULES):
        job = PipelineJob(seed)
        assert job.play() == "ok", f"seed {seed}"
        over += job.redone_over
        idly += job.adopted_idly
    assert over == 0, "one loss costs that member's tasks at most"
    assert idly == 0, "a block is adopted where it is computed, and nowhere else"


@pytest.mark.on_demand
@pytest.mark.timeout(0)
def test_twenty_thousand_schedules_hold() -> None:
    assert outcomes(range(20_000)) == {"ok": 20_000}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_broken_rule_is_found(plant: str) -> None:
    assert first_found(plant) != "ok"


def test_without_extension_blocks_are_handed_out_whose_tensors_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo._Coming, "has", lambda *_: True)
    assert first_found("") in ("stuck", "nobody can compute it")


def test_where_the_needs_of_living_tasks_are_forgotten_they_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "_waited_for", lambda *_: set())
    assert first_found("", within=1500) == "stuck"


def test_where_nothing_kept_is_sent_again_a_task_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redo, "_resends", lambda *_: ())
    assert first_found("") == "stuck"


def test_where_every_task_in_flight_holds_a_forward_back_members_block_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(actions, "_held_back_by", lambda task, in_flight: len(in_flight))
    assert first_found("", within=2000) == "stuck"
