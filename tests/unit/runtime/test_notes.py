"""Notes of a worker about steps that move no parameter, and about plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from elastrain.job.scaling import NO_SCALE, LossScale, Scaler
from elastrain.job.values import Contribution, Record
from elastrain.job.world import Member, View
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.runtime.io.journal import Notes
from tests.unit.decisions.test_rerouting import RECORD


def _told(
    steps: list[bool],
    capsys: pytest.CaptureFixture[str],
    *,
    me: str = "m0",
    weight: float = 1.0,
    scale: Scaler = NO_SCALE,
) -> list[str]:
    """What is shown of these steps, each skipped or not."""
    anything: Any = SimpleNamespace(me=me, write=lambda *_, **__: None, say=lambda _: None)
    notes = Notes(anything, anything)
    view = View(generation=1, members=tuple(Member(id=name, node="a") for name in ("m0", "m1")))
    for number, skipped in enumerate(steps):
        counted = Contribution(loss=0.0, weight=weight, samples=2, fingerprint=0)
        record = Record(
            step=number,
            generation=1,
            contribution=counted,
            square_norm=0.0,
            skipped=skipped,
            switch=False,
            scaler=scale,
        )
        notes.passed(record, view)
    return capsys.readouterr().err.splitlines()


def test_the_first_is_told_and_then_ever_fewer_of_those_in_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    why = "its gradient is infinite or NaN (step.skipped)"
    assert _told([False, True, False, *[True] * 120], capsys) == [
        f"elastrain: step 1 has moved no parameter: {why}",
        f"elastrain: step 3 has moved no parameter: {why}",
        f"elastrain: step 12 has moved no parameter, and is the 10th in a row: {why}",
        f"elastrain: step 102 has moved no parameter, and is the 100th in a row: {why}",
    ]


def test_one_member_tells_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert _told([True], capsys, me="m1") == []


def test_a_step_without_weight_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert _told([True], capsys, weight=0.0) == [
        "elastrain: step 0 has moved no parameter: its micro-batches have no weight together (step.skipped)"
    ]


def test_a_loss_scale_that_is_being_found_is_nothing_to_tell(capsys: pytest.CaptureFixture[str]) -> None:
    told = _told([True] * 10, capsys, scale=LossScale().start)
    assert [line.split(":")[1] for line in told] == [" step 9 has moved no parameter, and is the 10th in a row"]


def test_every_member_tells_a_new_plan_and_why_it_came() -> None:
    lines: list[dict[str, Any]] = []
    said: list[Any] = []
    journal: Any = SimpleNamespace(write=lambda event, **fields: lines.append({"event": event, **fields}))
    notes = Notes(journal, SimpleNamespace(me="m1", say=said.append))  # type: ignore[arg-type]
    whole = Pipeline(members=("m0", "m1"), cuts=(1,), share=2, limits=(2, 1))
    alone = Pipeline(members=("m1",), cuts=(), share=2, limits=(1,))
    for pipeline in (whole, replace(whole, limits=(3, 2)), None, alone):
        plan = "digest" if pipeline is None else PipelinePlan(blocks=3, pipelines=(pipeline,))
        notes.passed(replace(RECORD, step=RECORD.step + len(lines), plan=plan), None)
    assert [each.reason for each in said] == ["the first plan", "", "members have come or gone"]
    assert said[0].step == RECORD.step + 1 and len(lines) == 3, "a plan that stays is told once"
    assert said[0].pipelines == ({"runs": 2, "blocks": {"m0": (0, 1), "m1": (1, 3)}, "limits": (2, 1)},)
    assert [(each["event"], each["pipelines"]) for each in lines] == [("plan", each.pipelines) for each in said]
