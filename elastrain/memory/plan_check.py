"""The exact memory check of a plan before it is proposed, by the account that each member will make. Pure.

The planner bounds what plans take. Under a memory limit a member ends if a plan does not fit, so the first member of
the view makes every other member's account beforehand.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from elastrain.job.placement import Placement, target
from elastrain.memory import memory_budget as budget
from elastrain.memory.member_account import Decision, Limit, MemberAccount
from elastrain.memory.pipeline_memory import Load, ModelBytes
from elastrain.memory.refused_copies import are_short, fitted
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, held, routes
from elastrain.pipeline.planner.plan_vote import ToldMemory
from elastrain.pipeline.planning import PlanWish, first_plan

UNSEEN_BYTES = 96 << 20
"""Bytes that a member may seem to take in its first step besides what was counted: libraries load pages in it."""


def told_of(needs: budget.Needs, limit_bytes: int, *, leaves: bool) -> ToldMemory:
    """Return what a member with a memory limit tells about its needs. `leaves`: activations may move to disk."""
    return ToldMemory(
        limit_bytes=limit_bytes,
        base_bytes=needs.base_bytes,
        taken_bytes=needs.least_bytes if leaves else needs.total_bytes,
        has_limit=True,
        activations_leave=leaves,
    )


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
    return _parameters_bytes(account, model, held(plan)[account.me])


def _parameters_bytes(account: MemberAccount, model: ModelBytes, blocks: Collection[int]) -> int:
    me, shards = account.me, account.shape.shards
    # The states of its own shards work on the model's memory.
    mine = (shards[at].lanes for each in account.placements for at, its in enumerate(each) if its.primary == me)
    places = frozenset(blocks).union(*({model.places[block] for block in lanes} for lanes in mine))
    return sum(model.parameters_of(place) for place in places)


def lacking_bytes(plan: PipelinePlan, account: MemberAccount, told: Mapping[str, ToldMemory]) -> dict[str, int]:
    """Return the bytes that each member of a plan lacks, without those that lack none.

    While shards have too few holders, a member lacks only what it has no room for without taking further copies. Else a
    plan for which members would have to refuse copies is none: it would cost backups.

    Args:
        plan: The plan that is to be proposed.
        account: The account of any member under the plan in force.
        told: What members have told of their memory.
    """
    if account.pipeline is None:
        return {}
    model, _ = account.pipeline
    placements, tasks = (account.placements[0], goal_of(account, model, plan)), _tasks_by_member(plan)
    found, may_refuse = dict[str, int](), are_short(account)
    for member in (m for m in plan.members if m in told and told[m].has_limit):
        own = replace(_placed(account, plan, member, tasks[member]), placements=placements)
        lack = _lack(own, told[member], bytes_under(own, model, plan), may_refuse=may_refuse)
        if lack is not None:
            found[member] = lack.missing_bytes
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
    if any(_lack(own, its, account.sizes.whole_bytes) is not None for own in first):
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


def largest_lack(
    account: MemberAccount, tasks: Mapping[str, Sequence[Task]], told: Mapping[str, ToldMemory]
) -> tuple[str, budget.Shortfall] | None:
    """Return the other member that lacks most under the plan in force, and what it lacks. None if no other one lacks.

    Args:
        account: The account of any member under the plan in force.
        tasks: Open tasks by member.
        told: What members have told of their memory.
    """
    found: list[tuple[str, budget.Shortfall]] = []
    for member in (m for m in account.view.ids if m != account.me and m in told and told[m].has_limit):
        own, parameters_bytes = replace(account, me=member, copied_bytes=0), account.sizes.whole_bytes
        if account.pipeline is not None:
            model, load = account.pipeline
            own = replace(own, pipeline=(model, replace(load, tasks=tuple(tasks.get(member, ())))))
            blocks = frozenset(block for task in own.pipeline[1].tasks for block in task.blocks) if own.pipeline else ()
            parameters_bytes = _parameters_bytes(own, model, blocks)
        # It has refused what it could, as each member does before it ends.
        lack = _lack(own, told[member], parameters_bytes, may_refuse=True)
        if lack is not None:
            found.append((member, lack))
    return max(found, key=lambda each: each[1].missing_bytes, default=None)


def _lack(
    own: MemberAccount, its: ToldMemory, parameters_bytes: int, *, may_refuse: bool = False
) -> budget.Shortfall | None:
    sizes = {"base_bytes": its.base_bytes, "parameters_bytes": parameters_bytes}
    limit = Limit(limit_bytes=its.limit_bytes, has_disk=its.activations_leave)

    def judge(own: MemberAccount) -> Decision:
        # A member copies as much at once as its limit leaves room for.
        copying = own.with_copies(limit.limit_bytes, own.needs(**sizes))
        return copying.decide(copying.needs(**sizes), limit)

    decided = (fitted(own, judge)[1] if may_refuse else judge(own)).fit
    return decided if isinstance(decided, budget.Shortfall) else None
