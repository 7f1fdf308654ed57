"""The memory that each member of a job will hold, by the account of its worker. It is told before the job starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from elastrain.job.checkpoint_plan import writers
from elastrain.job.placement import target
from elastrain.job.run_plan import plan as hand_out
from elastrain.job.values import Shape
from elastrain.job.world import Member, View
from elastrain.memory import held_shards
from elastrain.memory import memory_budget as budget
from elastrain.memory.held_shards import MemoryKind
from elastrain.memory.member_account import Limit, MemberAccount, ModelSizes
from elastrain.memory.pipeline_memory import Load, ModelBytes, tasks_of
from elastrain.memory.plan_check import bytes_under, goal_of
from elastrain.pipeline.open_tasks import StepShape
from elastrain.pipeline.planning import PlanWish, first_plan

STEP, MOVING, ENDED = "in a step", "while holders move", "at the end"


@dataclass(frozen=True, kw_only=True)
class ScriptNeeds:
    """Bytes that a script needs on every member."""

    shape: Shape
    sizes: ModelSizes
    moments: tuple[float, ...]
    """Per shard, the optimizer's own state after a step, in units of the parameters'."""
    base_bytes: int
    """Interpreter, libraries and data, as the kernel counts them when the script calls `prepare`.

    On a device: tensors that are there besides.
    """
    landing_bytes: int
    """The largest parameter's gradient, as a backward makes it before it is added to a copy."""
    all_write: bool | None = None
    """True if every holder writes its copy of a shard (`--checkpoint-layout local`). False: one writer per shard.

    None: the job writes no checkpoint.
    """
    limit: Limit | None = None
    fewest: int = 0
    """With `--stages auto`: the members per pipeline. 0 before they are found."""
    tier_bytes: int = 0
    """Host memory for what leaves a device. It is taken at once."""


@dataclass(frozen=True, kw_only=True)
class HeldAt:
    """Memory held under one plan: bytes by part, and the bytes that lie on disk under a memory limit."""

    moment: str
    parts: Mapping[str, int]
    spill: int

    @property
    def total(self) -> int:
        """Bytes in memory: all parts, without those on disk."""
        return sum(self.parts.values()) - self.spill

    @property
    def told(self) -> dict[str, int | str]:
        """The values for a JSON report."""
        return {"moment": self.moment, **self.parts, "spill": self.spill, "total": self.total}


@dataclass(frozen=True, kw_only=True)
class MemberBytes:
    """Memory that one member holds. Without stages, activations are missing, because they were not measured yet."""

    member: str
    node: str
    moments: tuple[HeldAt, ...]
    shortfall: str = ""
    """Reason why the memory limit is too small; empty if it is not."""

    @property
    def worst(self) -> HeldAt:
        """The moment at which it holds most."""
        return max(self.moments, key=lambda each: each.total)


def state_memory(
    script: ScriptNeeds, nodes: Mapping[str, str], traced: ModelBytes | None = None
) -> tuple[MemberBytes, ...]:
    """Estimate the bytes of every member of a job that begins with all of `nodes` (member -> node, in rank order).

    traced: the model of a job in pipelines; None without stages.
    """
    view = View(generation=0, members=tuple(Member(id=member, node=node) for member, node in nodes.items()))
    return tuple(_member(script, view, member.id, traced) for member in view.members)


def with_stages_found(script: ScriptNeeds, nodes: Mapping[str, str], traced: ModelBytes) -> ScriptNeeds:
    """Return the needs with the fewest members per pipeline that fit, if `--stages auto` asks for them.

    If none fits, pipelines are as long as the legal cuts and members allow.
    """
    if script.shape.pipelining is None or script.shape.pipelining.stages:
        return script
    # By the account of every member, which a worker makes of its own places only.
    found = script
    for fewest in range(1, min(len(nodes), len(traced.graph.units)) + 1):
        found = replace(script, fewest=fewest)
        if not any(each.shortfall for each in state_memory(found, nodes, traced)):
            break
    return found


def _member(script: ScriptNeeds, view: View, me: str, traced: ModelBytes | None) -> MemberBytes:
    shape, moments, shortfall = script.shape, list[HeldAt](), ""
    # No member holds anything yet: the first view makes its placement in the same way.
    begun = target([None] * len(shape.shards), shape.sizes, view.nodes, shape.backups)
    account = MemberAccount(me=me, shape=shape, sizes=script.sizes, view=view, placements=(begun, begun))
    plans = _whole_runs(script, account) if traced is None else _stretches(script, account, traced)
    for when, planned, parameters_bytes in plans:
        at, lack = _held_at(script, when, planned, parameters_bytes)
        # Only rank 0 has to take all blocks at the end. Other members without room for them keep their own.
        if not (lack and planned.is_over and me != view.ids[0]):
            moments.append(at)
            shortfall = shortfall or lack
    return MemberBytes(member=me, node=view.nodes[me], moments=tuple(moments), shortfall=shortfall)


def _whole_runs(script: ScriptNeeds, account: MemberAccount) -> Iterator[tuple[str, MemberAccount, int]]:
    shape = account.shape
    slots = budget.slots_needed(shape.runs, (), hand_out(account.view.ids, shape.runs)[account.me])
    account = replace(account, slots=slots, is_checked=True, is_fresh=True)
    yield STEP, account, script.sizes.whole_bytes


def _stretches(
    script: ScriptNeeds, account: MemberAccount, model: ModelBytes
) -> Iterator[tuple[str, MemberAccount, int]]:
    """Yield the plans of a pipeline's member, in order, each with the bytes of its parameters."""
    shape, view, me, whole_bytes = account.shape, account.view, account.me, script.sizes.whole_bytes
    (begun, _), its = account.placements, shape.pipelining
    assert its is not None
    wish = PlanWish(stages=its.stages or script.fewest, runs=shape.runs, is_least=not its.stages)
    plan = first_plan(model.graph, view.ids, wish)
    step = StepShape(
        number=0, micro_batches=its.micro_batches, run_length=its.run_length, blocks=len(model.graph.blocks)
    )
    load = Load(tasks=tasks_of(plan, me), shape=step, in_flight=plan.limits[me])
    account = replace(account, pipeline=(model, load))
    yield STEP, account, whole_bytes
    # With the first commit holders begin to move to the members that compute their blocks.
    moving = replace(account, placements=(begun, goal_of(account, model, plan)), copied_bytes=budget.COPY_BUDGET_BYTES)
    yield MOVING, moving, min(whole_bytes, bytes_under(moving, model, plan))
    # A short job may end before they have moved.
    yield ENDED, replace(moving, pipeline=None, is_over=True), whole_bytes


def _held_at(script: ScriptNeeds, when: str, account: MemberAccount, parameters_bytes: int) -> tuple[HeldAt, str]:
    """Return what the member holds under this plan, and why its memory limit is too small ("" if it is not)."""
    model_bytes = 0 if account.sizes.memory == MemoryKind.HOST else parameters_bytes

    def needs_of(account: MemberAccount) -> budget.Needs:
        return account.needs(base_bytes=script.base_bytes + script.tier_bytes, parameters_bytes=model_bytes)

    outside, activations_bytes, lack = frozenset[int](), 0, ""
    if script.limit is not None:
        # A worker has not seen an update yet, so it checks its limit with the assumed optimizer state.
        before = replace(account, copied_bytes=0)
        account = before.with_copies(script.limit.limit_bytes, needs_of(before))
        needs, fit, _ = account.decide(needs_of(account), script.limit)
        if isinstance(fit, budget.Shortfall):
            lack = fit.reason
        else:
            outside, _ = held_shards.choose_shards(account.held, fit.shards_on_disk_bytes)
            activations_bytes = max(0, needs.activations_bytes - fit.activations_bytes)
    account = replace(account, moments=script.moments)
    spilled_bytes = sum(each.leaves_bytes for each in account.held if each.shard in outside)
    parts = _parts(script, account, needs_of(account))
    return HeldAt(moment=when, parts=parts, spill=activations_bytes + spilled_bytes), lack


def _parts(script: ScriptNeeds, account: MemberAccount, needs: budget.Needs) -> dict[str, int]:
    is_host = account.sizes.memory == MemoryKind.HOST
    backups_bytes = sum(each.leaves_bytes for each in account.held if not each.is_primary)
    return {
        "base": needs.base_bytes - script.tier_bytes,
        "tier": script.tier_bytes,
        "computing": 0 if account.is_over or is_host else budget.COMPUTING_BYTES + script.landing_bytes,
        "model": needs.parameters_bytes,
        "gradients": needs.gradients_bytes - account.copying_bytes,
        "check": needs.with_check(needs.shards_bytes) - needs.shards_bytes,
        "activations": needs.activations_bytes,
        "boundaries": needs.boundaries_bytes,
        "shards": needs.shards_bytes - backups_bytes,
        "backups": backups_bytes // 2,
        "unverified": backups_bytes - backups_bytes // 2,
        "copies": account.copying_bytes,
        "staging": _staging_bytes(script, account),
    }


def _staging_bytes(script: ScriptNeeds, account: MemberAccount) -> int:
    """Count the states of a checkpoint that wait for the disk at most, and the memory for writing."""
    # In the worst case all captured states wait at once, while the held ones have moved on. A backup's captured states
    # are no copies, but they are kept beyond the step in which they would have been replaced.
    if script.all_write is None or account.sizes.memory == MemoryKind.DEVICE:
        return 0
    sizes, pairs = script.shape.sizes, set[tuple[str, int]]()
    for placement in account.placements:
        pairs |= writers(placement, sizes, all_holders=script.all_write)
    staged = [round(sizes[shard] * (1 + script.moments[shard])) for writer, shard in pairs if writer == account.me]
    return sum(staged) + (budget.WRITING_BYTES if staged else 0)
