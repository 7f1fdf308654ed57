"""States what each member will hold in memory, before a job starts, by the account that the memory limit keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from elastrain import memory_budget as budget
from elastrain.checkpoint import writers
from elastrain.pipeline.plan import PipelinePlan
from elastrain.pipeline.room import Lack, Load, TaskBytes
from elastrain.pipeline.statement import StagedScript
from elastrain.placement import Placement, target
from elastrain.plan import plan as hand_out


@dataclass(frozen=True, kw_only=True)
class WorkerLimit:
    """What each member may hold, and how it decides what leaves."""

    limit_bytes: int
    has_disk: bool
    assumed_moments: float
    """Optimizer state in units of the parameters', as a worker takes it to be until it has measured it."""


@dataclass(frozen=True, kw_only=True)
class ScriptNeeds:
    """What a script prepares, in bytes; the same on every member."""

    sizes: tuple[int, ...]
    """Per shard, of its parameters as the optimizer keeps them."""
    moments: tuple[float, ...]
    """Per shard, the optimizer's own state after a step, in units of `sizes`."""
    frozen: frozenset[int] = frozenset()
    """Shards that get no gradients."""
    masters: bool
    """Whether primaries keep parameters of more precision than the model's."""
    model_bytes: int
    slot_bytes: int
    """One copy of all gradients."""
    runs: int
    backups: int
    base_bytes: int
    """Interpreter, libraries and data, as the kernel counts them where the script prepares."""
    behind_bytes: int
    """Of backups, what is updated in one go."""
    all_write: bool | None = None
    """Whether every holder writes its copy of a shard (`--checkpoint-layout local`) instead of one per shard; None: no
    checkpoint is written."""
    limit: WorkerLimit | None = None


@dataclass(frozen=True, kw_only=True)
class MemberBytes:
    """What one member holds at the peak of a step; without stages nobody has measured the activations yet."""

    member: str
    node: str
    base: int
    moment: str
    """When it is at its most: with stages in its first step, while holders move after it, or at the end of the loop."""
    model: int
    """With stages of the whole model up to the first commit and at the end, else of its blocks and its shards'."""
    gradients: int
    """Copies of the gradient, partials on their way, gradients kept for backups, scratch of updates."""
    activations: int
    """With stages: saved for backward by all micro-batches in flight, and what crosses the cuts in a step."""
    shards: int
    """As a primary: what the optimizer keeps besides the model's parameters."""
    backups: int
    """Of others' shards: their parameters and state, and those of the step that is not verified yet."""
    staging: int
    """States of a durable checkpoint that wait for the disk, at most."""
    spill: int
    """What lies on disk to stay within the memory limit: of activations, of shards and of backups."""
    shortfall: str = ""
    """Why the memory limit is too small, if it is."""

    @property
    def total(self) -> int:
        held = self.base + self.model + self.gradients + self.activations + self.shards + self.backups + self.staging
        return held - self.spill


def state_memory(
    script: ScriptNeeds, nodes: Mapping[str, str], staged: StagedScript | None = None, *, is_checked_again: bool = False
) -> tuple[MemberBytes, ...]:
    """State the bytes of every member of a job that begins with all of `nodes` (member -> node, in rank order).

    staged: what it computes in pipelines; None without stages.
    is_checked_again: members compute micro-batches of their neighbours' in later steps than the first, too.
    """
    if staged is None:
        return tuple(_member(script, nodes, work) for work in _whole_runs(script, nodes, is_checked_again))
    plan = staged.plan(list(nodes))
    works = [_moments(script, nodes, staged, plan, member) for member in nodes]
    return tuple(
        _worst([_member(script, nodes, work) for work in each], is_first=not n) for n, each in enumerate(works)
    )


def _worst(moments: Sequence[MemberBytes], *, is_first: bool) -> MemberBytes:
    """The moment at which the member holds most; one at which its limit is too small goes before."""
    *before, end = moments
    # Only rank 0 has to take all blocks at the end: another one without room for them keeps its own.
    moments = moments if is_first or not end.shortfall else before
    # The job would end there, however little is held at that moment.
    refused = next((each for each in moments if each.shortfall), None)
    return refused or max(moments, key=lambda each: each.total)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """What a member has and computes at one moment, and where shards are held then: now and soon."""

    member: str
    moment: str
    parameters_bytes: int
    slots_bytes: int
    check_bytes: int = 0
    """Of them, what is there for a check in the first step alone."""
    placements: tuple[Placement, ...]
    tasks: TaskBytes = field(default_factory=TaskBytes)
    pipeline: tuple[StagedScript, Load] | None = None

    @property
    def is_end(self) -> bool:
        """The loop has ended, and nothing is computed any more."""
        return self.pipeline is not None and not self.tasks.total_bytes


def _begun(script: ScriptNeeds, nodes: Mapping[str, str]) -> Placement:
    # Nobody holds anything yet: the first view makes its placement in the same way.
    return target([None] * len(script.sizes), script.sizes, nodes, script.backups)


def _whole_runs(script: ScriptNeeds, nodes: Mapping[str, str], is_checked_again: bool) -> Iterator[_Work]:
    # In its first step every member also computes a micro-batch of a neighbour's, if it has one.
    runs, placement = hand_out(nodes, script.runs), _begun(script, nodes)
    for member in nodes:
        # Slots are used again in every step, so that the most that any step needs is what a member holds.
        checked = [len(nodes) > 1, len(nodes) > 1 and is_checked_again]
        first, later = (budget.slots_needed(script.runs, (), runs[member], is_checked=each) for each in checked)
        yield _Work(
            member=member,
            moment="in any step",
            parameters_bytes=script.model_bytes,
            slots_bytes=first * script.slot_bytes,
            check_bytes=(first - later) * script.slot_bytes,
            placements=(placement,),
        )


def _moments(
    script: ScriptNeeds, nodes: Mapping[str, str], staged: StagedScript, plan: PipelinePlan, member: str
) -> tuple[_Work, ...]:
    """Of one member of a pipeline, in the order in which they come."""
    placement = _begun(script, nodes)
    # With the first commit holders begin to move to where their blocks are computed.
    goal = target(placement, script.sizes, nodes, script.backups, staged.homes(plan))
    load = staged.load(plan, member, is_spread=len(set(nodes.values())) > 1)
    tasks = staged.tasks(load)
    first = _Work(
        member=member,
        moment="in the first step",
        parameters_bytes=script.model_bytes,
        slots_bytes=tasks.gradients_bytes,
        placements=(placement,),
        tasks=tasks,
        pipeline=(staged, load),
    )
    kept = {shard for each in (placement, goal) for shard, holders in enumerate(each) if holders.primary == member}
    moving = replace(
        first,
        moment="while holders move",
        parameters_bytes=min(script.model_bytes, staged.parameters_bytes(plan, member, kept)),
        placements=(placement, goal),
    )
    # A short job may end before they have moved.
    end = replace(moving, moment="at the end", parameters_bytes=script.model_bytes, tasks=TaskBytes())
    return first, moving, end


def _member(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work) -> MemberBytes:
    held = _held(script, work, script.moments)
    needs = _needs(script, nodes, work, held)
    backups_bytes = sum(each.leaves_bytes for each in held if not each.is_primary)
    # At the worst all that it is to write waits at once, while what it holds has gone on: a backup's captured states
    # are no copies, but they are kept beyond the step in which they would have been replaced.
    is_written, last = script.all_write is not None, work.placements[-1]
    written = writers(last, script.sizes, all_holders=bool(script.all_write)) if is_written else frozenset()
    staged = [shard for writer, shard in written if writer == work.member]
    spill_bytes, shortfall = _leaves(script, nodes, work, held)
    return MemberBytes(
        member=work.member,
        node=nodes[work.member],
        base=script.base_bytes + budget.COMPUTING_BYTES,
        moment=work.moment,
        model=work.parameters_bytes,
        gradients=needs.gradients_bytes - max(0, min(work.check_bytes, _updated(script, work, held) - spill_bytes)),
        activations=needs.activations_bytes + needs.boundaries_bytes,
        shards=needs.shards_bytes - backups_bytes,
        backups=backups_bytes,
        staging=sum(round(script.sizes[shard] * (1 + script.moments[shard])) for shard in staged)
        + (budget.WRITING_BYTES if staged else 0),
        spill=spill_bytes,
        shortfall=shortfall,
    )


def _updated(script: ScriptNeeds, work: _Work, held: tuple[budget.Held, ...]) -> int:
    """Count what the first update brings, when the copy of a check has gone: states, scratch, gradients kept."""
    # Before it a backup has parameters alone, once.
    begun_bytes = sum(each.leaves_bytes // (1 if each.is_primary else 2) for each in _held(script, work, 0.0))
    return script.behind_bytes + sum(each.gradient_bytes + each.leaves_bytes for each in held) - begun_bytes


def _held(script: ScriptNeeds, work: _Work, moments: float | Sequence[float]) -> tuple[budget.Held, ...]:
    return budget.held_by(
        work.member, work.placements, script.sizes, moments=moments, masters=script.masters, frozen=script.frozen
    )


def _needs(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work, held: tuple[budget.Held, ...]) -> budget.Needs:
    """As a worker counts them."""
    shards_bytes, least_bytes = budget.shards_bytes(held)
    needs = budget.Needs(
        base_bytes=script.base_bytes,
        parameters_bytes=work.parameters_bytes,
        gradients_bytes=work.slots_bytes + budget.sums_bytes(held, len(nodes), script.behind_bytes),
        shards_bytes=shards_bytes,
        shards_least_bytes=least_bytes,
        # Captured states are not in its account, and without stages activations are not measured.
        activations_bytes=work.tasks.activations_bytes,
        activations_least_bytes=0,
        is_measured=False,
        boundaries_bytes=work.tasks.boundaries_bytes,
    )
    if work.pipeline is None:
        return needs
    # Where holders stay in their places, nothing is on its way to new ones.
    is_moving = len(set(work.placements)) > 1
    copying_bytes = _copying_bytes(script, needs, work.pipeline[0], len(nodes)) if is_moving else 0
    if work.is_end:
        return budget.at_the_end(needs, work.parameters_bytes, copying_bytes)
    return replace(needs, gradients_bytes=needs.gradients_bytes + copying_bytes)


def _copying_bytes(script: ScriptNeeds, needs: budget.Needs, staged: StagedScript, members: int) -> int:
    """What copies take that are on their way to new holders."""
    most_bytes, moments = staged.copied_bytes, max(script.moments)
    copied_bytes = min(most_bytes, sum(script.sizes))
    if script.limit is not None:
        # A worker plans its copies before it has seen an update, so with what it assumes.
        moments = script.limit.assumed_moments
        copied_bytes = budget.copy_budget(
            script.limit.limit_bytes,
            needs,
            members=members,
            state_per_parameter=1 + moments,
            least_bytes=budget.least_copied(script.sizes, most_bytes),
            most_bytes=most_bytes,
        )
    return round(2 * copied_bytes * (1 + moments))


def _leaves(script: ScriptNeeds, nodes: Mapping[str, str], work: _Work, held: Sequence[budget.Held]) -> tuple[int, str]:
    """Count what lies on disk, as a worker decides before its first step, or say why nothing helps."""
    limit = script.limit
    if limit is None:
        return 0, ""
    # It has not seen an update yet: so it is with what it assumes that its limit has room, or has not.
    assumed = _held(script, work, limit.assumed_moments)
    needs = _needs(script, nodes, work, assumed)
    # The pace of the disk shows only in a reason that nobody reads here.
    fit = budget.fit_plan(limit.limit_bytes, needs, has_disk=limit.has_disk, disk_bytes_per_s=1.0)
    if isinstance(fit, budget.Shortfall):
        return 0, fit.reason + _advice(script, len(nodes), work, needs, fit)
    outside, _ = budget.choose_shards(assumed, fit.shards_on_disk_bytes)
    activations_bytes = max(0, needs.activations_bytes - fit.activations_bytes)
    return activations_bytes + sum(each.leaves_bytes for each in held if each.shard in outside), ""


def _advice(script: ScriptNeeds, members: int, work: _Work, needs: budget.Needs, short: budget.Shortfall) -> str:
    """Which stages would fit, where these do not."""
    if work.pipeline is None or script.limit is None:
        return ""
    if work.is_end:
        return budget.AT_THE_END
    (staged, load), has_disk = work.pipeline, script.limit.has_disk
    leaving_bytes = work.tasks.activations_bytes if has_disk else 0
    taken_bytes = needs.parameters_bytes + work.tasks.total_bytes - leaving_bytes
    lack = Lack(
        members=members,
        left_bytes=taken_bytes - short.missing_bytes,
        missing_bytes=short.missing_bytes,
        activations_leave=has_disk,
        parameters_bytes=script.model_bytes if needs.parameters_bytes == script.model_bytes else None,
    )
    return f"; {staged.advice(load, lack)}"
