"""The exact memory check of a plan before it is proposed, by the account that each member will make. Pure.

The planner bounds what plans take. Under a memory limit a member ends if a plan does not fit, so the first member of
the view makes every other member's account beforehand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

from elastrain.job.placement import Placement, target
from elastrain.memory import memory_budget as budget
from elastrain.memory.member_account import Limit, MemberAccount
from elastrain.memory.pipeline_memory import Load, ModelBytes
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, held, routes
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.pipeline.planning import PlanWish, first_plan

UNSEEN_BYTES = 96 << 20
"""Bytes that a member may seem to take in its first step besides what was counted: libraries load pages in it."""


def goal_of(account: MemberAccount, model: ModelBytes, plan: PipelinePlan) -> Placement:
    """Return the holders to which the shards move under a plan: members that compute with them."""
    shape, view, blocks = account.shape, account.view, held(plan)
    lanes = [shard.lanes for shard in shape.shards]
    places = [{model.places[block] for block in its} for its in lanes]
    homes = [tuple(m for m in view.ids if not blocks.get(m, frozenset()).isdisjoint(at)) for at in places]
    return target(
        account.placements[0], shape.sizes, view.nodes, shape.backups, homes, [shard.lanes for shard in shape.shards]
    )


def bytes_under(account: MemberAccount, model: ModelBytes, plan: PipelinePlan) -> int:
    """Return the bytes of parameters on the account's member: of its blocks by the plan, and of its own shards."""
    me, shards = account.me, account.shape.shards
    # The states of its own shards work on the model's memory.
    mine = (shards[at].lanes for each in account.placements for at, its in enumerate(each) if its.primary == me)
    places = held(plan)[me].union(*({model.places[block] for block in lanes} for lanes in mine))
    return sum(model.parameters_of(place) for place in places)


def lacking_bytes(plan: PipelinePlan, account: MemberAccount, told: Mapping[str, ToldMemory]) -> dict[str, int]:
    """Return the bytes that each member of a plan lacks, without those that lack none.

    Args:
        plan: The plan that is to be proposed.
        account: The account of any member under the plan in force.
        told: What members have told of their memory.
    """
    if account.pipeline is None:
        return {}
    model, _ = account.pipeline
    placements, tasks = (account.placements[0], goal_of(account, model, plan)), _tasks_by_member(plan)
    found = dict[str, int]()
    for member in (m for m in plan.members if m in told and told[m].has_limit):
        own = replace(_placed(account, plan, member, tasks[member]), placements=placements)
        missing_bytes = _missing_bytes(own, told[member], bytes_under(own, model, plan))
        if missing_bytes:
            found[member] = missing_bytes
    return found


def fewest_stages(account: MemberAccount, model: ModelBytes, step: StepShape, its: ToldMemory) -> int:
    """Return the fewest members per pipeline with which a member has room in any place of the first plan.

    If it has room in none, pipelines are as long as the legal cuts and members allow.

    Args:
        account: The account of any member before the first step, without tasks.
        model: The traced model.
        step: The first step.
        its: The member's memory, which counts as that of all members.
    """
    # From below, and not by halves: a longer pipeline may need more, since its first member has more in flight.
    members, load = account.view.ids, Load(tasks=(), shape=step, in_flight=1)
    most = min(len(members), len(model.graph.units))
    for stages in range(1, most):
        plan = first_plan(model.graph, members, PlanWish(stages=stages, runs=step.runs, is_least=True))
        left = replace(its, has_limit=True, limit_bytes=its.limit_bytes - UNSEEN_BYTES)
        if _has_room(replace(account, pipeline=(model, load)), plan, left):
            return stages
    return most


def _has_room(account: MemberAccount, plan: PipelinePlan, its: ToldMemory) -> bool:
    """Return True if the first step has room under a plan, and the steps after it, in the places that need most."""
    tasks = _tasks_by_member(plan)
    # The first pipeline takes most runs, and the last is the shortest. The others need no more than these two.
    places = {member: its for pipeline in (plan.pipelines[0], plan.pipelines[-1]) for member in pipeline.members}
    # In the first step each member has the parameters of all blocks.
    first = (_placed(account, plan, member, tasks[member]) for member in places)
    if any(_missing_bytes(own, its, account.sizes.whole_bytes) for own in first):
        return False
    return not lacking_bytes(plan, account, places)


def _tasks_by_member(plan: PipelinePlan) -> dict[str, list[Task]]:
    tasks: dict[str, list[Task]] = defaultdict(list)
    for task in (task for route in routes(plan) for task in route):
        tasks[task.member].append(task)
    return tasks


def _placed(account: MemberAccount, plan: PipelinePlan, member: str, tasks: list[Task]) -> MemberAccount:
    """Return the account of a member with its tasks of a plan."""
    assert account.pipeline is not None
    model, load = account.pipeline
    its = replace(load, tasks=tuple(tasks), in_flight=plan.limits[member])
    return replace(account, me=member, pipeline=(model, its), copied_bytes=0)


def _missing_bytes(own: MemberAccount, its: ToldMemory, parameters_bytes: int) -> int:
    sizes = {"base_bytes": its.base_bytes, "parameters_bytes": parameters_bytes}
    limit = Limit(limit_bytes=its.limit_bytes, has_disk=its.activations_leave)
    # A member copies as much at once as its limit leaves room for.
    own = own.with_copies(limit.limit_bytes, own.needs(**sizes))
    decided = own.decide(own.needs(**sizes), limit).fit
    return decided.missing_bytes if isinstance(decided, budget.Shortfall) else 0
