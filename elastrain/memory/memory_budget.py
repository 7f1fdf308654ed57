"""The decision whether a member's plan fits into its memory, and what moves to disk. Pure functions of measured bytes.

Activations leave first: they are written once and read once per micro-batch, while the model computes. Then optimizer
shards leave, and the step waits for them. Nothing else can leave, and splitting a micro-batch would change the bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from elastrain.job.fold import Fold, Node, absorb
from elastrain.memory.held_shards import MemoryKind

ASSUMED_MOMENTS = 2.0
"""Size of the optimizer state in units of the parameters, until it was measured: that of Adam."""
COPY_BUDGET_BYTES = 4 << 20
"""Bytes of parameters that a primary has on their way to new holders at a time. The vote waits for them."""
COPY_SHARE = 16
"""At least 1/COPY_SHARE of the parameters may be on their way to new holders, however little memory is left."""

WRITING_BYTES = 16 << 20
"""Bytes for writing a checkpoint, besides the states: frames being packed, and frames being read back."""
COMPUTING_BYTES = 8 << 20
"""Bytes that computing keeps from its first step on, besides what is counted. A minimum: up to 20 MB were seen."""
VARIES = 8
"""Part of what belongs to no block by which it differs between runs: up to 9 % in a dozen runs of one job."""
WORTH_TELLING = 0.05
"""Smallest share of the limit that is given back to activations when memory becomes free."""
AT_THE_END = "; at the end of the loop rank 0, which this member is, takes the parameters of all blocks"
"""Reason why the first member of pipelines may need more than its own blocks do."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes that a member must hold at once under a plan."""

    base_bytes: int
    """Interpreter, libraries, data, and what computing takes besides saved activations."""
    parameters_bytes: int
    gradients_bytes: int
    """Gradient slots, sums under way, finished and kept gradients, and scratch of updates."""
    shards_bytes: int
    """Optimizer state of the shards that it holds, as their primary or as a backup."""
    shards_least_bytes: int
    """Part of `shards_bytes` that has to be in memory while all of it is kept on disk."""
    activations_bytes: int
    """Activations saved for backward by the micro-batches in flight (one, except in pipelines).

    In pipelines the number comes from the tracing pass. Else it is 0 until a step was measured.
    """
    activations_least_bytes: int
    """Part of `activations_bytes` that has to be in memory while as much as possible is kept on disk."""
    is_measured: bool = True
    """True once a step has shown how much memory activations need."""
    boundaries_bytes: int = 0
    """Boundary tensors of a pipeline that this member makes or reads."""
    check_bytes: int = 0
    """Gradients of a neighbour's micro-batch, which is computed to check the neighbour."""
    shards_at_check_bytes: int = 0
    """Part of `shards_bytes` that is there while the neighbour's micro-batch is computed."""

    @property
    def fixed_bytes(self) -> int:
        """Bytes that cannot move to disk."""
        # Not even gradients: other members read them from this memory, at any moment of a step.
        return self.base_bytes + self.parameters_bytes + self.gradients_bytes + self.boundaries_bytes

    def with_check(self, shards_bytes: int) -> int:
        """Return the more of: so many bytes of shards, and those that are there at a check, with the check itself."""
        return max(shards_bytes, self.check_bytes + min(shards_bytes, self.shards_at_check_bytes))

    @property
    def total_bytes(self) -> int:
        """Most bytes of the plan at once."""
        return self.fixed_bytes + self.with_check(self.shards_bytes) + self.activations_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes in memory while as much as possible is kept on disk."""
        # Something of both has to be in memory at any time: a shard while it is updated, a storage while it is used.
        return self.fixed_bytes + self.with_check(self.shards_least_bytes) + self.activations_least_bytes

    @property
    def largest(self) -> tuple[str, int]:
        """The part that takes most, in words, and its bytes."""
        parts = {
            "what belongs to no block": self.base_bytes,
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "optimizer states": self.shards_bytes,
            "saved activations": self.activations_bytes,
            "boundary tensors": self.boundaries_bytes,
        }
        return max(parts.items(), key=lambda each: each[1])


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Limits under which the plan fits: bytes of saved activations in memory, and bytes of shards on disk."""

    activations_bytes: int
    shards_on_disk_bytes: int
    reason: str

    def is_news(self, last: Fit | None, limit_bytes: int) -> bool:
        """Return True if this is to be carried out within a view, in which `last` holds.

        Activations get memory back only if it is worth it, and shards never do.
        """
        if last is None or self.shards_on_disk_bytes > last.shards_on_disk_bytes:
            return True
        more_bytes = self.activations_bytes - last.activations_bytes
        return more_bytes < 0 or more_bytes > WORTH_TELLING * limit_bytes


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """A plan that does not fit, whatever moves to disk."""

    missing_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The places for what leaves a memory. In sentences they are called "disk", or as a device's job has them."""

    bytes_per_s: float = 1.0
    """The slower of the drives' two directions. Reasons state the cost per step with it."""
    name: str = "disk"
    room_bytes: int | None = None
    """Bytes that have room there; None for no bound."""


def fit_plan(
    limit_bytes: int, needs: Needs, *, outside: Outside | None, memory: MemoryKind = MemoryKind.ONE
) -> Fit | Shortfall:
    """Decide what stays in memory under `limit_bytes`. Activations leave first, then shards.

    Args:
        limit_bytes: Bytes of the memory that may be used.
        needs: Bytes of the plan.
        outside: Places for what leaves, or None if there are none.
        memory: The memory that is limited.
    """
    spare_bytes = limit_bytes - needs.total_bytes
    if spare_bytes >= 0:
        reason = f"{mib(needs.total_bytes)} of {mib(limit_bytes)} are needed: everything stays in {memory}"
        return Fit(activations_bytes=spare_bytes + needs.activations_bytes, shards_on_disk_bytes=0, reason=reason)
    if outside is None or needs.least_bytes > limit_bytes:
        return _missing(limit_bytes, needs, outside, memory)
    if outside.room_bytes is not None and (lacking_bytes := -spare_bytes - outside.room_bytes) > 0:
        return Shortfall(
            missing_bytes=lacking_bytes,
            reason=f"{mib(needs.total_bytes)} are needed and {mib(limit_bytes)} of {memory} allowed, and "
            f"{outside.name} has room for {mib(outside.room_bytes)} of the rest: name a directory on an SSD for what "
            "is left (--offload-dir), or raise --host-tier",
        )
    # Before activations were measured, they get all memory that shards can leave them. Too little room for activations
    # would end the job, while shards come back to memory after the first step.
    may_stay_bytes = needs.shards_bytes if needs.is_measured else needs.shards_least_bytes
    if outside.room_bytes is not None:
        may_stay_bytes = max(may_stay_bytes, needs.shards_bytes - outside.room_bytes // 2)
    left_bytes = limit_bytes - needs.fixed_bytes
    most_bytes = left_bytes - needs.activations_least_bytes
    if needs.check_bytes + needs.shards_at_check_bytes > most_bytes:
        most_bytes -= needs.check_bytes
    kept_shards_bytes = min(may_stay_bytes, most_bytes)
    kept_activations_bytes = left_bytes - needs.with_check(kept_shards_bytes)
    shards_out_bytes = needs.shards_bytes - kept_shards_bytes
    if shards_out_bytes > 0 and memory == MemoryKind.DEVICE and outside.room_bytes is None:
        # Each state outside is in memory while it is updated, which the estimate has to foresee.
        shards_out_bytes = min(needs.shards_bytes, shards_out_bytes + needs.shards_least_bytes)
    activations_out_bytes = max(0, needs.activations_bytes - kept_activations_bytes)
    return Fit(
        activations_bytes=kept_activations_bytes,
        shards_on_disk_bytes=shards_out_bytes,
        reason=f"{mib(needs.total_bytes)} are needed and {mib(limit_bytes)} allowed: "
        + _leaving(activations_out_bytes, shards_out_bytes, outside),
    )


def at_the_end(needs: Needs, parameters_bytes: int, copying_bytes: int = 0) -> Needs:
    """Return the needs of a pipeline's member when its loop has ended: all parameters, and no more computing.

    copying_bytes: part of `gradients_bytes` for copies under way; the rest is freed before blocks arrive.
    """
    return replace(
        needs,
        parameters_bytes=max(needs.parameters_bytes, parameters_bytes),
        gradients_bytes=copying_bytes,
        activations_bytes=0,
        activations_least_bytes=0,
        boundaries_bytes=0,
        check_bytes=0,
    )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step under the present plan: peak of the memory held, and the part of it that was saved activations."""

    kept_to: Fit
    """The limits that the step has kept to."""
    peak_bytes: int
    activations_bytes: int


def settle(
    limit_bytes: int, decided: Fit | Shortfall, measured: Measured, memory: MemoryKind = MemoryKind.ONE
) -> Fit | Shortfall:
    """Choose between what the last step has kept to, and `decided`, which was estimated after it."""
    last = measured.kept_to
    # A measured fit beats an estimate: within a view no plan is then refused, and no shard leaves.
    more_leaves = isinstance(decided, Shortfall) or decided.shards_on_disk_bytes > last.shards_on_disk_bytes
    if measured.peak_bytes > limit_bytes or not more_leaves:
        return decided
    return Fit(
        activations_bytes=measured.activations_bytes + limit_bytes - measured.peak_bytes,
        shards_on_disk_bytes=last.shards_on_disk_bytes,
        reason=f"{mib(measured.peak_bytes)} of {mib(limit_bytes)} of {memory} were held in the last step: it fits as "
        "it is",
    )


def _leaving(activations_bytes: int, shards_bytes: int, outside: Outside) -> str:
    """Return what leaves memory, and its cost per micro-batch (activations) or per step (shards), in words."""
    parts = [
        f"{mib(size_bytes)} of {what} go to {outside.name} "
        f"({2 * size_bytes / outside.bytes_per_s:.3f} s of its time per {unit})"
        for what, size_bytes, unit in (
            ("activations", activations_bytes, "micro-batch"),
            ("optimizer shards", shards_bytes, "step"),
        )
        if size_bytes
    ]
    return " and ".join(parts)


def _missing(limit_bytes: int, needs: Needs, outside: Outside | None, memory: MemoryKind) -> Shortfall:
    # Without a disk nothing can leave, and the whole plan has to fit.
    has_disk = outside is not None
    wanted_bytes = needs.least_bytes if has_disk else needs.total_bytes
    missing_bytes = wanted_bytes - limit_bytes
    tier = ", and no --host-tier" if memory == MemoryKind.DEVICE else ""
    how = (
        f"with activations and optimizer shards on {outside.name}"
        if outside is not None
        else f"and there is no directory on an SSD to move anything to (--offload-dir){tier}"
    )
    part, part_bytes = needs.largest
    # An operator who raises the limit as told must not be refused again for an unknown need, or by chance.
    advised = mib(missing_bytes + needs.base_bytes // VARIES)
    is_known = needs.is_measured or (needs.activations_bytes > 0 and not has_disk)
    unknown = "" if is_known else ", and more for saved activations, which were not measured yet"
    return Shortfall(
        missing_bytes=missing_bytes,
        reason=f"a member's {memory} limit is {mib(missing_bytes)} too small for this plan: {mib(wanted_bytes)} are "
        f"needed {how}{unknown}, {mib(limit_bytes)} allowed; most of it are {part} ({mib(part_bytes)}); smaller "
        f"micro-batches would change the bits: raise the limit by {advised}, or start with more members",
    )


def too_small(
    limit_bytes: int, *, needed_bytes: int, left_bytes: int, share: int, memory: MemoryKind = MemoryKind.ONE
) -> str:
    """Return the error text if one operation needs more of its saved activations at once than is left for them.

    share: activations get 1/share of every additional byte of the limit.
    """
    smallest_bytes = limit_bytes + share * (needed_bytes - left_bytes)
    needed_mib, left_mib = needed_bytes / (1 << 20), left_bytes / (1 << 20)
    return (
        f"a member's {memory} limit of {mib(limit_bytes)} is too small: one operation of the model needs "
        f"{needed_mib:.1f} MiB of saved activations at once and {left_mib:.1f} MiB are left for them; the "
        f"smallest limit that lets it work is {mib(smallest_bytes)}"
    )


def mib(size_bytes: int) -> str:
    """Return bytes as MiB, rounded up, so that a shortfall is never shown as 0."""
    return f"{-(-size_bytes // (1 << 20))} MiB"


def slots_needed(runs: int, own: Iterable[Node], todo: Sequence[int]) -> int:
    """Count the copies of the gradient that a member holds at the peak of a step of `runs` runs.

    own: the partials that it has. todo: the runs that it is going to compute, in order.
    """
    # Siblings are added in place, so one copy remains of both. The run being computed has a copy of its own.
    fold, held = Fold(runs), frozenset(own)
    most = len(held)
    for run in todo:
        most = max(most, len(held) + 1)
        held, _ = absorb(fold, held, (run, run + 1))
    return most


def copy_budget(free_bytes: int, sizes: Sequence[int], state_per_parameter: float) -> int:
    """Return how many bytes of parameters a member may have on their way to new holders, together with their state.

    sizes: those of all shards. At least the largest may be on its way, so that copying comes to an end.
    state_per_parameter: bytes that a member may get for each byte, if all other members copy to it at once.
    """
    # A quick copy shortens the time in which the next loss is fatal. `free_bytes` is negative if things are on disk
    # already: then as little as possible is copied.
    least_bytes = min(max(*sizes, sum(sizes) // COPY_SHARE), COPY_BUDGET_BYTES)
    return max(least_bytes, min(COPY_BUDGET_BYTES, round(free_bytes / state_per_parameter)))
