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
from elastrain.memory.pipeline_memory import ModelBytes
from elastrain.pipeline.pipeline_plan import PipelinePlan, Task, held, routes
from elastrain.pipeline.planner.plan_vote import ToldMemory


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
    model, load = account.pipeline
    tasks: dict[str, list[Task]] = defaultdict(list)
    for task in (task for route in routes(plan) for task in route):
        tasks[task.member].append(task)
    placements, found = (account.placements[0], goal_of(account, model, plan)), dict[str, int]()
    for member in (m for m in plan.members if m in told and told[m].has_limit):
        its = replace(load, tasks=tuple(tasks[member]), in_flight=plan.limits[member])
        own = replace(account, me=member, placements=placements, pipeline=(model, its), copied_bytes=0)
        sizes = {"base_bytes": told[member].base_bytes, "parameters_bytes": bytes_under(own, model, plan)}
        limit = Limit(limit_bytes=told[member].limit_bytes, has_disk=told[member].activations_leave)
        # A member copies as much at once as its limit leaves room for.
        own = own.with_copies(limit.limit_bytes, own.needs(**sizes))
        decided = own.decide(own.needs(**sizes), limit).fit
        if isinstance(decided, budget.Shortfall):
            found[member] = decided.missing_bytes
    return found
