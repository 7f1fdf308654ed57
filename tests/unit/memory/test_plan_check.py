"""The exact memory check of plans: a member lacks room where its own account says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain.job.placement import target
from elastrain.job.world import Member, View
from elastrain.memory.member_account import MemberAccount
from elastrain.memory.pipeline_memory import Load, tasks_of
from elastrain.memory.plan_check import bytes_under, goal_of, lacking_bytes
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.planner.plan_vote import ToldMemory
from tests.unit.memory.test_memory_estimate_stages import MIB, MODEL, SCRIPT, SHAPE

VIEW = View(generation=1, members=tuple(Member(id=m, node="node0") for m in ("m0", "m1")), reason="")
NOW = target([None] * 4, SHAPE.sizes, VIEW.nodes, SHAPE.backups)
STEP = StepShape(number=0, micro_batches=4, run_length=1, blocks=4)
TOLD = ToldMemory(limit_bytes=0, base_bytes=10 * MIB, taken_bytes=0, has_limit=True)


def plan_of(cut: int, more: int = 0) -> PipelinePlan:
    pipeline = Pipeline(members=("m0", "m1"), cuts=(cut,), share=4, limits=(2 + more, 1 + more), is_split=False)
    return PipelinePlan(blocks=4, pipelines=(pipeline,))


def account_of(member: str, plan: PipelinePlan) -> MemberAccount:
    load = Load(tasks=tasks_of(plan, member), shape=STEP, in_flight=plan.limits[member])
    return MemberAccount(
        me=member, shape=SHAPE, sizes=SCRIPT.sizes, view=VIEW, placements=(NOW, NOW), pipeline=(MODEL, load)
    )


def needed_bytes(member: str, plan: PipelinePlan) -> int:
    """Return the bytes that the member's own keeper counts under the plan, with the fewest copies on their way."""
    own = account_of(member, plan)
    own = replace(own, placements=(NOW, goal_of(own, MODEL, plan)))
    sizes = {"base_bytes": TOLD.base_bytes, "parameters_bytes": bytes_under(own, MODEL, plan)}
    return own.with_copies(0, own.needs(**sizes)).needs(**sizes).total_bytes


@pytest.mark.parametrize("cut", [1, 2, 3])
@pytest.mark.parametrize("asker", ["m0", "m1"])
def test_a_member_lacks_what_its_own_account_lacks(cut: int, asker: str) -> None:
    plan, present = plan_of(cut), account_of(asker, plan_of(2))
    needed = needed_bytes("m1", plan)
    for more_bytes, lacks in [(0, {}), (5 * MIB, {}), (-1, {"m1": 1}), (-MIB, {"m1": MIB})]:
        told = {"m0": replace(TOLD, limit_bytes=1 << 40), "m1": replace(TOLD, limit_bytes=needed + more_bytes)}
        assert lacking_bytes(plan, present, told) == lacks


def test_more_in_flight_takes_more_and_may_leave_to_a_directory() -> None:
    limit_bytes = needed_bytes("m1", plan_of(2)) + MIB
    told = {m: replace(TOLD, limit_bytes=limit_bytes if m == "m1" else 1 << 40) for m in VIEW.ids}
    present = account_of("m0", plan_of(2))
    assert lacking_bytes(plan_of(2, more=1), present, told).keys() == {"m1"}
    on_disk = {m: replace(its, activations_leave=True) for m, its in told.items()}
    assert lacking_bytes(plan_of(2, more=1), present, on_disk) == {}


def test_members_without_a_limit_lack_nothing_and_before_the_tracing_pass_nothing_is_known() -> None:
    plan, present = plan_of(2), account_of("m0", plan_of(2))
    assert lacking_bytes(plan, present, {m: replace(TOLD, has_limit=False) for m in VIEW.ids}) == {}
    assert lacking_bytes(plan, replace(present, pipeline=None), dict.fromkeys(VIEW.ids, TOLD)) == {}
