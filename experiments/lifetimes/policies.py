"""Other policies as plans, carried out by the same engine: ZeRO-Infinity's, after its paper, and none at all. Pure."""

from __future__ import annotations

from elastrain.offload.planning import program as facts
from elastrain.offload.planning.orders import UpdateOrder
from elastrain.offload.planning.plan_search import Policy
from elastrain.offload.planning.plan_values import Budget, Gap, Kind, Move, Plan, Played, Program, Share


def _plan(program: Program, reads_ahead: int, *, with_activations: bool) -> Plan:
    """Everything leaves after each use, and is read so many points before its next one."""
    gaps = [gap for gap in facts.gaps(program) if with_activations or _kind(program, gap) is not Kind.ACTIVATION]
    moves = tuple(
        Move(
            gap=gap,
            write_after=None if gap.changed is None or gap.changed != gap.begin else gap.changed,
            read_at=max(gap.begin + 1, gap.end - reads_ahead),
            shares=(Share(tier=0, size_bytes=program.pieces[gap.piece].size_bytes),),
        )
        for gap in gaps
    )
    unknown = Played(step_s=0.0, stalls_s=(), peak_bytes=0, written_bytes=0, read_bytes=0)
    return Plan(program=program, moves=moves, recomputed=(), played=unknown, reason="everything leaves after each use")


def _kind(program: Program, gap: Gap) -> Kind:
    return program.pieces[gap.piece].kind


def _one_block_ahead(program: Program, _budget: Budget) -> Plan:
    return _plan(program, 1, with_activations=False)


def _on_demand(program: Program, _budget: Budget) -> Plan:
    return _plan(program, 0, with_activations=False)


def _as_it_is(plan: Plan, _budget: Budget) -> Plan:
    return plan


ZERO_INFINITY = Policy(
    make=_one_block_ahead, improve=_as_it_is, orders=(UpdateOrder.AFTER_BACKWARD,), recompute=False, keep_freed=False
)
"""Out after each use, one block ahead, updates at the end. With layerwise recomputation, which the model does."""
ON_DEMAND = Policy(
    make=_on_demand, improve=_as_it_is, orders=(UpdateOrder.AFTER_BACKWARD,), recompute=False, keep_freed=False
)
"""Read when needed, written when left. Likewise with recomputation."""
