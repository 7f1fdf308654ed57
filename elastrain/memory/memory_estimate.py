"""Estimate of the memory that each member will hold, made before a job starts, by the rules of the memory limit."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastrain.buffers.background import BEHIND_BYTES
from elastrain.job.checkpoint_plan import writers
from elastrain.job.placement import Placement, target
from elastrain.job.run_plan import plan as hand_out
from elastrain.memory import memory_budget as budget
from elastrain.memory.memory_moments import ADDING, CHECKING, COMPUTING, ENDED, VERIFYING, HeldAt, held_at, most
from elastrain.memory.pipeline_memory import Load, StagedScript, TaskBytes, advice, lack_of, task_bytes


@dataclass(frozen=True, kw_only=True)
class WorkerLimit:
    """A member's memory limit, and what its decision about moving to disk depends on."""

    limit_bytes: int
    has_disk: bool
    assumed_moments: float
    """Optimizer state in units of the parameters', as a worker assumes it until it has measured it."""


@dataclass(frozen=True, kw_only=True)
class ScriptNeeds:
    """Bytes that a script needs on every member."""

    sizes: tuple[int, ...]
    """Per shard, its parameters as the optimizer keeps them."""
    moments: tuple[float, ...]
    """Per shard, the optimizer's own state after a step, in units of `sizes`."""
    frozen: frozenset[int] = frozenset()
    """Shards that get no gradients."""
    masters: bool
    """True if primaries keep parameters of more precision than the model's."""
    model_bytes: int
    slot_bytes: int
    """One copy of all gradients."""
    runs: int
    backups: int
    base_bytes: int
    """Interpreter, libraries and data, as the kernel counts them when the script calls `prepare`."""
    landing_bytes: int
    """The largest parameter's gradient, as a backward makes it before it is added to a copy."""
    all_write: bool | None = None
    """True if every holder writes its copy of a shard (`--checkpoint-layout local`). False: one writer per shard.

    None: the job writes no checkpoint.
    """
    limit: WorkerLimit | None = None


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
    script: ScriptNeeds, nodes: Mapping[str, str], staged: StagedScript | None = None, *, is_checked_again: bool = False
) -> tuple[MemberBytes, ...]:
    """Estimate the bytes of every member of a job that begins with all of `nodes` (member -> node, in rank order).

    staged: the pipelined computation; None without stages.
    is_checked_again: members compute probes of their neighbours also in later steps than the first.
    """
    # No member holds anything yet: the first view makes its placement in the same way.
    begun = target([None] * len(script.sizes), script.sizes, nodes, script.backups)
    stretches: Iterable[tuple[_Work, ...]] = ((each,) for each in _whole_runs(script, nodes, begun, is_checked_again))
    if staged is not None:
        stretches = _stretches(script, nodes, begun, staged)
    return tuple(_member(script, nodes, works, is_first=not n) for n, works in enumerate(stretches))


@dataclass(frozen=True, kw_only=True)
class _Work:
    """A member's memory and work in one period of a job, with the placements of shards: present and future."""

    member: str
    when: str
    moments: tuple[str, ...]
    """Moments besides those of the first step."""
    parameters_bytes: int
    slots_bytes: int
    check_bytes: int = 0
    planned_bytes: int
    """Bytes for copies of the gradient in a worker's own plan."""
    placements: tuple[Placement, ...]
    makers: tuple[tuple[str, ...], ...]
    """Per shard, the members that compute gradients of it."""
    tasks: TaskBytes = field(default_factory=TaskBytes)
    pipeline: tuple[StagedScript, Load] | None = None

    @property
    def is_end(self) -> bool:
        """True after the end of the loop, when nothing is computed."""
        return self.moments == (ENDED,)


def _whole_runs(
    script: ScriptNeeds, nodes: Mapping[str, str], begun: Placement, is_checked_again: bool
) -> Iterator[_Work]:
    # In its first step every member also computes a micro-batch of a neighbour, if it has one.
    runs, is_checked = hand_out(nodes, script.runs), len(nodes) > 1
    for member in nodes:
        # Slots are reused in every step, so a member holds the most that any step needs.
        slots, planned = (budget.slots_needed(script.runs, (), runs[member], is_checked=c) for c in (False, is_checked))
        yield _Work(
            member=member,
            when="",
            moments=(COMPUTING, *((CHECKING,) if is_checked and is_checked_again else ()), ADDING, VERIFYING),
            parameters_bytes=script.model_bytes,
            slots_bytes=slots * script.slot_bytes,
            check_bytes=script.slot_bytes if is_checked else 0,
            planned_bytes=planned * script.slot_bytes,
            placements=(begun,),
            makers=(tuple(nodes),) * len(script.sizes),
        )


def _stretches(
    script: ScriptNeeds, nodes: Mapping[str, str], begun: Placement, staged: StagedScript
) -> Iterator[tuple[_Work, ...]]:
    """Yield the periods of each member of a pipeline, in order."""
    plan = staged.plan(list(nodes))
    homes = staged.homes(plan)
    # With the first commit holders begin to move to the members that compute their blocks.
    goal = target(begun, script.sizes, nodes, script.backups, homes)
    for member in nodes:
        load = staged.load(plan, member, is_spread=len(set(nodes.values())) > 1)
        tasks = task_bytes(staged.model, load)
        first = _Work(
            member=member,
            when="",
            moments=(),
            parameters_bytes=script.model_bytes,
            slots_bytes=tasks.gradients_bytes,
            planned_bytes=tasks.gradients_bytes,
            placements=(begun,),
            makers=tuple(homes),
            tasks=tasks,
            pipeline=(staged, load),
        )
        kept = {shard for each in (begun, goal) for shard, holders in enumerate(each) if holders.primary == member}
        moving = replace(
            first,
            when="while holders move",
            moments=(COMPUTING, ADDING, VERIFYING),
            parameters_bytes=min(script.model_bytes, staged.parameters_bytes(plan, member, kept)),
            placements=(begun, goal),
        )
        # A short job may end before they have moved.
        end = replace(moving, when="", moments=(ENDED,), parameters_bytes=script.model_bytes, tasks=TaskBytes())
        yield first, moving, end


def _member(script: ScriptNeeds, nodes: Mapping[str, str], works: Sequence[_Work], *, is_first: bool) -> MemberBytes:
    moments: list[HeldAt] = []
    shortfall = ""
    for work in works:
        outside, activations_bytes, lack = _leaves(script, nodes, work)
        # Only rank 0 has to take all blocks at the end. Other members without room for them keep their own.
        if lack and work.is_end and not is_first:
            continue
        shortfall = shortfall or lack
        if work is works[0]:
            # Before the first update a backup has only parameters, and no gradients were added.
            fresh = replace(script, moments=(0.0,) * len(script.sizes), frozen=frozenset(range(len(script.sizes))))
            begun = {**_taken(fresh, nodes, work, work.placements[0]), "staging": 0, "unverified": 0}
            on_disk = {**_states(fresh, work, work.placements[0], outside), "activations": activations_bytes}
            names = (COMPUTING, CHECKING) if work.check_bytes else (COMPUTING,)
            moments += [held_at(name, begun, on_disk, "in the first step") for name in names]
        if work.moments:
            taken = most(_taken(script, nodes, work, each) for each in work.placements)
            on_disk = most(_states(script, work, each, outside) for each in work.placements)
            on_disk["activations"] = activations_bytes
            moments += [held_at(name, taken, on_disk, work.when) for name in work.moments]
    return MemberBytes(member=works[0].member, node=nodes[works[0].member], moments=tuple(moments), shortfall=shortfall)


def _taken(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work, placement: Placement) -> dict[str, int]:
    """Count, by part, the memory of the member under one placement."""
    held = _held(script, work, script.moments, (placement,))
    # In the worst case all captured states wait to be written at once, while the held ones have moved on. A backup's
    # captured states are no copies, but they are kept beyond the step in which they would have been replaced.
    every = script.all_write
    pairs = frozenset() if every is None else writers(placement, script.sizes, all_holders=every)
    staged = [shard for writer, shard in pairs if writer == work.member]
    primary_bytes = sum(each.gradient_bytes for each in held if each.is_primary)
    kept_bytes = sum(each.gradient_bytes for each in held if not each.is_primary)
    sums_bytes = sum(_buffers(work, each.shard) * each.gradient_bytes for each in held if each.is_primary)
    return {
        "base": script.base_bytes,
        "computing": budget.COMPUTING_BYTES + script.landing_bytes,
        "model": work.parameters_bytes,
        # A backup keeps one gradient until its update is verified; no later one is finished before that.
        "gradients": work.slots_bytes + sums_bytes + kept_bytes + max(primary_bytes, min(BEHIND_BYTES, kept_bytes)),
        "check": work.check_bytes,
        "activations": work.tasks.activations_bytes,
        "boundaries": work.tasks.boundaries_bytes,
        **_states(script, work, placement),
        "copies": min(_copying_bytes(script, nodes, work), _new_bytes(script, work)),
        "staging": sum(round(script.sizes[shard] * (1 + script.moments[shard])) for shard in staged)
        + (budget.WRITING_BYTES if staged else 0),
    }


def _buffers(work: _Work, shard: int) -> int:
    """Count the sums of one shard that a primary has at once: one per level of the tree if it adds in order."""
    makers = work.makers[shard]
    # Results of a single member are no sums: they are used in place, or copied as they arrive.
    return 0 if makers == (work.member,) else max(1, len(makers).bit_length() - 1)


def _states(
    script: ScriptNeeds, work: _Work, placement: Placement, only: Collection[int] | None = None
) -> dict[str, int]:
    """Count the bytes of the states of the shards that the member holds, or of those in `only`."""
    held = [h for h in _held(script, work, script.moments, (placement,)) if only is None or h.shard in only]
    backups_bytes = sum(each.leaves_bytes for each in held if not each.is_primary)
    return {
        "shards": sum(each.leaves_bytes for each in held if each.is_primary),
        "backups": backups_bytes // 2,
        "unverified": backups_bytes // 2,
    }


def _held(
    script: ScriptNeeds, work: _Work, moments: float | Sequence[float], placements: Sequence[Placement]
) -> tuple[budget.Held, ...]:
    return budget.held_by(
        work.member, placements, script.sizes, moments=moments, masters=script.masters, frozen=script.frozen
    )


def _needs(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work, moments: float) -> budget.Needs:
    """Return a worker's needs as it counts them itself: without copies under way."""
    held = _held(script, work, moments, work.placements)
    shards_bytes, least_bytes = budget.shards_bytes(held)
    return budget.Needs(
        base_bytes=script.base_bytes,
        parameters_bytes=work.parameters_bytes,
        gradients_bytes=work.planned_bytes + budget.sums_bytes(held, len(nodes), BEHIND_BYTES),
        shards_bytes=shards_bytes,
        shards_least_bytes=least_bytes,
        # Captured states are not part of its account, and without stages activations are not measured.
        activations_bytes=work.tasks.activations_bytes,
        activations_least_bytes=0,
        is_measured=False,
        boundaries_bytes=work.tasks.boundaries_bytes,
    )


def _new_bytes(script: ScriptNeeds, work: _Work) -> int:
    """Count the bytes of shards that get new holders. They count twice, at the giver and at the receiver."""
    now, goal = ([{s.primary, *s.backups} for s in each] for each in (work.placements[0], work.placements[-1]))
    new = [shard for shard, (before, then) in enumerate(zip(now, goal, strict=True)) if then - before]
    return sum(round(2 * script.sizes[shard] * (1 + script.moments[shard])) for shard in new)


def _copying_bytes(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work) -> int:
    """Count the bytes of copies on their way to new holders; 0 if holders stay in their places."""
    if work.pipeline is None or len(set(work.placements)) == 1:
        return 0
    most_bytes, moments = work.pipeline[0].copied_bytes, max(script.moments)
    copied_bytes = min(most_bytes, sum(script.sizes))
    if script.limit is not None:
        # A worker plans its copies before it has seen an update, so it uses the assumed optimizer state.
        moments = script.limit.assumed_moments
        copied_bytes = budget.copy_budget(
            script.limit.limit_bytes,
            _needs(script, nodes, work, moments),
            members=len(nodes),
            state_per_parameter=1 + moments,
            least_bytes=budget.least_copied(script.sizes, most_bytes),
            most_bytes=most_bytes,
        )
    return round(2 * copied_bytes * (1 + moments))


def _leaves(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work) -> tuple[frozenset[int], int, str]:
    """Return the shards and the bytes of activations that a worker plans to keep on disk, or why nothing fits."""
    limit = script.limit
    if limit is None:
        return frozenset(), 0, ""
    # A worker has not seen an update yet, so it checks its limit with the assumed optimizer state.
    needs = _needs(script, nodes, work, limit.assumed_moments)
    copying_bytes = _copying_bytes(script, nodes, work)
    if work.is_end:
        needs = budget.at_the_end(needs, work.parameters_bytes, copying_bytes)
    else:
        needs = replace(needs, gradients_bytes=needs.gradients_bytes + copying_bytes)
    # The disk's speed appears only in a reason, which is not used here.
    fit = budget.fit_plan(limit.limit_bytes, needs, has_disk=limit.has_disk, disk_bytes_per_s=1.0)
    if isinstance(fit, budget.Shortfall):
        return frozenset(), 0, fit.reason + _advice(script, len(nodes), work, needs, fit)
    assumed = _held(script, work, limit.assumed_moments, work.placements)
    outside, _ = budget.choose_shards(assumed, fit.shards_on_disk_bytes)
    return outside, max(0, needs.activations_bytes - fit.activations_bytes), ""


def _advice(script: ScriptNeeds, members: int, work: _Work, needs: budget.Needs, short: budget.Shortfall) -> str:
    """Return advice on which stages would fit instead of these."""
    if work.pipeline is None or script.limit is None:
        return ""
    if work.is_end:
        return budget.AT_THE_END
    lack = lack_of(
        needs,
        work.tasks,
        members=members,
        missing_bytes=short.missing_bytes,
        whole_bytes=script.model_bytes,
        activations_leave=script.limit.has_disk,
    )
    staged, load = work.pipeline
    return f"; {advice(staged.model, load, lack)}"
