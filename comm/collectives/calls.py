"""Which operation a call of a collective becomes, its arguments checked. Raises ValueError for unusable ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import AllReduce
from elastrain.comm.collectives.exchanges import Barrier, Exchange, ExchangeReduce, ScatterGatherReduce
from elastrain.comm.collectives.levels import TwoLevelReduce
from elastrain.comm.collectives.operations import Operation, Reduction, Seat, describe
from elastrain.comm.collectives.pulling import PulledReduce
from elastrain.comm.collectives.reducing import check_reduction


def barrier(seat: Seat, words: str) -> Operation:
    return Barrier(seat, words)


def roll_call(seat: Seat) -> Operation:
    nothing = dict.fromkeys(range(seat.world), torch.empty(0))
    partners = algorithms.all_to_all(seat.rank, seat.world)
    return Exchange(seat, "roll call", partners, given=nothing, wanted=nothing)


def broadcast(seat: Seat, tensor: torch.Tensor, root: int) -> Operation:
    partners = algorithms.one_to_others(seat.rank, seat.world, root)
    words = f"broadcast from rank {root} of {describe(tensor)}"
    return Exchange(seat, words, partners, given=dict.fromkeys(partners.to, tensor), wanted={root: tensor})


def all_gather(seat: Seat, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
    _check_count("all_gather", outs, seat)
    given, wanted = dict.fromkeys(range(seat.world), tensor), dict(enumerate(outs))
    return Exchange(
        seat, f"all_gather of {tensor.dtype}", algorithms.all_to_all(seat.rank, seat.world), given=given, wanted=wanted
    )


def gather(seat: Seat, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Operation:
    if seat.rank == root:
        _check_count("gather", outs or (), seat)
    partners = algorithms.others_to_one(seat.rank, seat.world, root)
    given, wanted = dict.fromkeys([*partners.to, seat.rank], tensor), dict(enumerate(outs or ()))
    return Exchange(seat, f"gather to rank {root} of {tensor.dtype}", partners, given=given, wanted=wanted)


def scatter(seat: Seat, tensor: torch.Tensor, given: Sequence[torch.Tensor] | None, root: int) -> Operation:
    if seat.rank == root:
        _check_count("scatter", given or (), seat)
    partners = algorithms.one_to_others(seat.rank, seat.world, root)
    words = f"scatter from rank {root} of {tensor.dtype}"
    return Exchange(seat, words, partners, given=dict(enumerate(given or ())), wanted={root: tensor})


def all_to_all(seat: Seat, outs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Operation:
    _check_count("all_to_all", outs, seat)
    _check_count("all_to_all", given, seat)
    partners = algorithms.all_to_all(seat.rank, seat.world)
    return Exchange(
        seat, f"all_to_all of {given[0].dtype}", partners, given=dict(enumerate(given)), wanted=dict(enumerate(outs))
    )


def reduce(seat: Seat, tensor: torch.Tensor, root: int, reduction: Reduction) -> Operation:
    check_reduction(reduction, tensor)
    partners = algorithms.others_to_one(seat.rank, seat.world, root)
    words = f"reduce ({reduction}) to rank {root} of {describe(tensor)}"
    given = dict.fromkeys([*partners.to, seat.rank], tensor)
    out = tensor if seat.rank == root else None
    return ExchangeReduce(seat, words, partners, given=given, out=out, reduction=reduction)


def reduce_scatter(seat: Seat, out: torch.Tensor, given: Sequence[torch.Tensor], reduction: Reduction) -> Operation:
    check_reduction(reduction, out)
    _check_count("reduce_scatter", given, seat)
    partners = algorithms.all_to_all(seat.rank, seat.world)
    words = f"reduce_scatter ({reduction}) of {out.dtype}"
    return ExchangeReduce(seat, words, partners, given=dict(enumerate(given)), out=out, reduction=reduction)


def all_reduce(seat: Seat, tensor: torch.Tensor, reduction: Reduction) -> Operation:
    check_reduction(reduction, tensor)
    words = f"all_reduce ({reduction}) of {describe(tensor)}"
    choice, _reason = algorithms.choose_all_reduce(
        tensor.nbytes, seat.world, pulled=seat.stage is not None, hosts=seat.hosts
    )
    if choice is AllReduce.TWO_LEVELS:
        return TwoLevelReduce(seat, words, tensor, reduction)
    if choice is AllReduce.SCATTER_GATHER:
        return ScatterGatherReduce(seat, words, tensor, reduction)
    if choice is AllReduce.PIPELINE:
        return PulledReduce(seat, words, tensor, reduction)
    partners = algorithms.all_to_all(seat.rank, seat.world)
    given = dict.fromkeys(range(seat.world), tensor)
    return ExchangeReduce(seat, words, partners, given=given, out=tensor, reduction=reduction)


def _check_count(what: str, tensors: Sequence[torch.Tensor], seat: Seat) -> None:
    if len(tensors) != seat.world:
        raise ValueError(f"{what} needs one tensor for each of {seat.world} ranks; got {len(tensors)}")
