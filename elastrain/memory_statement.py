"""States what each member will hold in memory, before a job starts, by the account that the memory limit keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elastrain import memory_budget as budget
from elastrain.checkpoint import writers
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
    """What one member holds at the peak of a step, without the activations, which nobody has measured yet."""

    member: str
    node: str
    base: int
    model: int
    gradients: int
    """Copies of the gradient, partials on their way, gradients kept for backups, scratch of updates."""
    shards: int
    """As a primary: what the optimizer keeps besides the model's parameters."""
    backups: int
    """Of others' shards: their parameters and state, and those of the step that is not verified yet."""
    staging: int
    """States of a durable checkpoint that wait for the disk, at most."""
    spill: int
    """Of shards and backups, what lies on disk to stay within the memory limit."""
    shortfall: str = ""
    """Why the memory limit is too small, if it is."""

    @property
    def total(self) -> int:
        return self.base + self.model + self.gradients + self.shards + self.backups + self.staging - self.spill


def state_memory(script: ScriptNeeds, nodes: Mapping[str, str]) -> tuple[MemberBytes, ...]:
    """State the bytes of every member of a job that begins with all of `nodes` (member -> node, in rank order)."""
    # Nobody holds anything yet: the first view makes its placement in the same way.
    placement = target([None] * len(script.sizes), script.sizes, nodes, script.backups)
    runs = hand_out(nodes, script.runs)
    # In its first step every member also computes a micro-batch of a neighbour's, if it has one.
    is_checked = len(nodes) > 1
    # Slots are used again in every step, so that the most that any step needs is what a member holds.
    slots = {m: budget.slots_needed(script.runs, (), todo, is_checked=is_checked) for m, todo in runs.items()}
    return tuple(_member(script, nodes, member, slots[member], placement) for member in nodes)


def _member(
    script: ScriptNeeds, nodes: Mapping[str, str], member: str, slots: int, placement: Placement
) -> MemberBytes:
    held = _held(script, member, placement, script.moments)
    gradients_bytes = slots * script.slot_bytes + budget.sums_bytes(held, len(nodes), script.behind_bytes)
    backups_bytes = sum(each.leaves_bytes for each in held if not each.is_primary)
    shards_bytes = sum(each.leaves_bytes for each in held if each.is_primary)
    # At the worst all that it is to write waits at once, while what it holds has gone on: a backup's captured states
    # are no copies, but they are kept beyond the step in which they would have been replaced.
    is_written = script.all_write is not None
    written = writers(placement, script.sizes, all_holders=bool(script.all_write)) if is_written else frozenset()
    staged = [shard for writer, shard in written if writer == member]
    staging_bytes = sum(round(script.sizes[shard] * (1 + script.moments[shard])) for shard in staged)
    outside, shortfall = _leaving(script, member, placement, gradients_bytes)
    return MemberBytes(
        member=member,
        node=nodes[member],
        base=script.base_bytes,
        model=script.model_bytes,
        gradients=gradients_bytes,
        shards=shards_bytes,
        backups=backups_bytes,
        staging=staging_bytes,
        spill=sum(each.leaves_bytes for each in held if each.shard in outside),
        shortfall=shortfall,
    )


def _held(
    script: ScriptNeeds, member: str, placement: Placement, moments: float | Sequence[float]
) -> tuple[budget.Held, ...]:
    return budget.held_by(
        member, (placement,), script.sizes, moments=moments, masters=script.masters, frozen=script.frozen
    )


def _leaving(
    script: ScriptNeeds, member: str, placement: Placement, gradients_bytes: int
) -> tuple[frozenset[int], str]:
    """Name the shards whose states lie on disk, as a worker decides before its first step, or say why none helps."""
    if script.limit is None:
        return frozenset(), ""
    # It has not seen an update yet: so it is with what it assumes that its limit has room, or has not.
    held = _held(script, member, placement, script.limit.assumed_moments)
    shards_bytes, least_bytes = budget.shards_bytes(held)
    # Captured states are not in its account, and activations are not measured.
    needs = budget.Needs(
        base_bytes=script.base_bytes,
        parameters_bytes=script.model_bytes,
        gradients_bytes=gradients_bytes,
        shards_bytes=shards_bytes,
        shards_least_bytes=least_bytes,
        activations_bytes=0,
        activations_least_bytes=0,
        is_measured=False,
    )
    fit = budget.fit_plan(script.limit.limit_bytes, needs, has_disk=script.limit.has_disk, disk_bytes_per_s=1.0)
    if isinstance(fit, budget.Shortfall):
        return frozenset(), fit.reason
    return budget.choose_shards(held, fit.shards_on_disk_bytes)[0], ""
