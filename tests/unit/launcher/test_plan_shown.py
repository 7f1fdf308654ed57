"""The plan of pipelines as status and the event log show it."""

from __future__ import annotations

from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.core import Core
from elastrain.launcher.core.progress import JobProgress
from elastrain.launcher.shared import operator_messages
from elastrain.launcher.shared.job_values import JobConfig, Log
from elastrain.launcher.watch.now import plan_lines
from elastrain.protocol.agent_messages import PlanTold

PIPELINES = (
    {"runs": 5, "blocks": {"m0": (0, 4), "m1": (4, 8)}, "limits": (2, 1)},
    {"runs": 3, "blocks": {"m2": (0, 8)}, "limits": (1,)},
)
FIRST = PlanTold(step=1, pipelines=PIPELINES, reason="the first plan")


def test_a_plan_is_logged_once_although_all_members_tell_it() -> None:
    progress = JobProgress()
    assert progress.plan == {}
    (logged,) = progress.on_plan(FIRST)
    assert isinstance(logged, Log) and logged.fields == {
        "step": 1,
        "pipelines": PIPELINES,
        "reason": "the first plan",
    }
    assert progress.on_plan(FIRST) == []


def test_the_last_decision_stays_until_another_is_told() -> None:
    progress = JobProgress()
    progress.on_plan(FIRST)
    assert progress.on_plan(PlanTold(reason="cut anew", speeds={"m0": 0.5})) == []
    progress.on_plan(PlanTold(step=7, pipelines=PIPELINES[:1]))
    assert progress.plan == {"step": 7, "pipelines": PIPELINES[:1], "reason": "cut anew", "speeds": {"m0": 0.5}}


def test_people_see_pipelines_blocks_runs_speeds_and_the_reason() -> None:
    assert plan_lines({"step": 7, "pipelines": PIPELINES, "reason": "cut anew", "speeds": {"m0": 0.5}}) == [
        "plan        since step 7; last decision: cut anew",
        "            5 runs: m0 blocks 0-3 at speed 0.50, m1 blocks 4-7",
        "            3 runs: m2 blocks 0-7",
    ]


def test_of_several_nodes_the_one_that_knows_the_newest_plan_and_the_speeds_is_shown() -> None:
    state = describe(Core(JobConfig(workers=1), (), choose=lambda members: members[0]), "job", 0.0)
    assert state["plan"] == {} and operator_messages.problem_of(state) == ""
    old, new = JobProgress(), JobProgress()
    for progress in (old, new):
        progress.on_plan(FIRST)
    new.on_plan(PlanTold(reason="cut anew", speeds={"m0": 0.5}))
    states = [state | {"plan": plan} for plan in ({}, old.plan, new.plan)]
    assert operator_messages._merged(states[0], states)["plan"] == new.plan
