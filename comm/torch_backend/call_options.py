"""Reads torch's options of a call: reduction, root, timeout, and whether torch waits at once."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch import Tensor

from elastrain.comm.collectives.operations import Reduction

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "avg"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


def as_list(tensors: list[Tensor] | Tensor) -> list[Tensor]:
    """torch's own code, DDP's `join` for one, also calls with a single tensor."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def root_of(opts: Any) -> int:
    return opts if isinstance(opts, int) else int(opts.rootRank)


def reduction_of(opts: Any) -> Reduction:
    if opts is None:
        return "sum"
    wanted = getattr(opts, "reduceOp", opts)
    # Not `in`: torch's operators are equal to the members of the enumeration, but hash differently.
    found = [reduction for operator, reduction in _REDUCTIONS if wanted == operator]
    if not found:
        raise ValueError(f"{wanted} is not offered; there are {', '.join(name for _, name in _REDUCTIONS)}")
    return found[0]


def timing_of(opts: Any) -> dict[str, Any]:
    """The arguments of every call of a group: its timeout in seconds, and whether torch is going to wait at once.

    A timeout of None means the group's own: torch's "not set" is negative or absent.
    """
    seconds = getattr(opts, "timeout", datetime.timedelta(-1)).total_seconds()
    return {"timeout_s": float(seconds) if seconds > 0 else None, "inline": not getattr(opts, "asyncOp", True)}
