"""The exact memory check of plans: a member lacks room where its own account says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.placement import target
from elastrain.job.values import Pipelining
from elastrain.job.world import Member, View
from elastrain.memory.member_account import Limit, MemberAccount
from elastrain.memory.memory_budget import Shortfall
from elastrain.memory.pipeline_memory import Load, tasks_of
from elastrain.memory.plan_check import UNSEEN_BYTES, bytes_under, fewest_stages, goal_of, lacking_bytes
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import Pipeline, PipelinePlan
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.pipeline.planning import PlanWish, first_plan
from tests.unit.memory.test_memory_estimate_stages import MIB, MODEL, SCRIPT, SHAPE

VIEW = View(generation=1, members=tuple(Member(id=m, node="node0") for m in ("m0", "m1")), reason="")
NOW = target([None] * 4, SHAPE.sizes, VIEW.nodes, SHAPE.backups)
STEP = StepShape(number=0, micro_batches=4, run_length=1, blocks=4)
AUTO = replace(SHAPE, pipelining=Pipelining(stages=0, micro_batches=4, run_length=1))
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


@given(limit=st.integers(20, 300), count=st.integers(1, 7), leaves=st.booleans())
def test_auto_stages_are_the_fewest_whose_places_all_have_room(limit: int, count: int, leaves: bool) -> None:
    view = View(generation=1, members=tuple(Member(id=f"m{i}", node="node0") for i in range(count)), reason="")
    now = target([None] * 4, AUTO.sizes, view.nodes, AUTO.backups)
    account = MemberAccount(me="m0", shape=AUTO, sizes=SCRIPT.sizes, view=view, placements=(now, now))
    its = replace(TOLD, limit_bytes=limit * MIB, activations_leave=leaves)
    asked = replace(its, has_limit=False, limit_bytes=its.limit_bytes + UNSEEN_BYTES)
    found = fewest_stages(account, MODEL, STEP, asked)
    most = min(count, len(MODEL.graph.units))
    assert 1 <= found <= most
    for stages in range(1, found + 1):
        plan = first_plan(MODEL.graph, view.ids, PlanWish(stages=stages, runs=4, is_least=True))
        present = replace(account, pipeline=(MODEL, Load(tasks=(), shape=STEP, in_flight=1)))
        lacking = lacking_bytes(plan, present, dict.fromkeys(view.ids, its))
        for member in view.ids:
            load = Load(tasks=tasks_of(plan, member), shape=STEP, in_flight=plan.limits[member])
            own = replace(account, me=member, pipeline=(MODEL, load))
            sizes = {"base_bytes": its.base_bytes, "parameters_bytes": SCRIPT.sizes.whole_bytes}
            limit_of = Limit(limit_bytes=its.limit_bytes, has_disk=leaves)
            own = own.with_copies(limit_of.limit_bytes, own.needs(**sizes))
            decided = own.decide(own.needs(**sizes), limit_of).fit
            if isinstance(decided, Shortfall):
                lacking[member] = decided.missing_bytes
        # If no number fits, the pipeline is as long as can be: its member with too little names what is missing.
        assert bool(lacking) == (stages < found) or found == most


def test_more_memory_never_asks_for_more_stages() -> None:
    account = MemberAccount(me="m0", shape=AUTO, sizes=SCRIPT.sizes, view=VIEW, placements=(NOW, NOW))
    found = [fewest_stages(account, MODEL, STEP, replace(TOLD, limit_bytes=mib * MIB)) for mib in range(20, 600, 4)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (2, 1)
