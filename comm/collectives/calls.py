"""Operations for the calls of a group, one function per collective. Raises ValueError for unusable arguments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import AllReduce
from elastrain.comm.collectives.exchanges import Barrier, Exchange, ExchangeReduce, ScatterGatherReduce
from elastrain.comm.collectives.pulling import PulledReduce
from elastrain.comm.collectives.reducing import Operation, Participant, Reduction, check_reduction, describe
from elastrain.comm.collectives.two_levels import TwoLevelReduce


def barrier(participant: Participant, description: str) -> Operation:
    """Return a barrier, with a description that all members must agree on."""
    return Barrier(participant, description)


def roll_call(participant: Participant) -> Operation:
    """Return a barrier in which every member hears from every other, so that it knows which are missing."""
    nothing = dict.fromkeys(range(participant.world), torch.empty(0))
    partners = algorithms.all_to_all(participant.rank, participant.world)
    return Exchange(participant, "roll call", partners, given=nothing, wanted=nothing)


def broadcast(participant: Participant, tensor: torch.Tensor, root: int) -> Operation:
    """Return the operation that copies rank `root`'s `tensor` into every other rank's."""
    partners = algorithms.one_to_others(participant.rank, participant.world, root)
    description = f"broadcast from rank {root} of {describe(tensor)}"
    return Exchange(participant, description, partners, given=dict.fromkeys(partners.to, tensor), wanted={root: tensor})


def all_gather(participant: Participant, outs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
    """Return the operation that copies rank r's `tensor` into `outs[r]` on every rank."""
    _check_count("all_gather", outs, participant)
    given, wanted = dict.fromkeys(range(participant.world), tensor), dict(enumerate(outs))
    return Exchange(
        participant,
        f"all_gather of {tensor.dtype}",
        algorithms.all_to_all(participant.rank, participant.world),
        given=given,
        wanted=wanted,
    )


def gather(participant: Participant, outs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, root: int) -> Operation:
    """Return the operation that copies rank r's `tensor` into `outs[r]` of rank `root`."""
    if participant.rank == root:
        _check_count("gather", outs or (), participant)
    partners = algorithms.others_to_one(participant.rank, participant.world, root)
    given, wanted = dict.fromkeys([*partners.to, participant.rank], tensor), dict(enumerate(outs or ()))
    return Exchange(participant, f"gather to rank {root} of {tensor.dtype}", partners, given=given, wanted=wanted)


def scatter(
    participant: Participant, tensor: torch.Tensor, given: Sequence[torch.Tensor] | None, root: int
) -> Operation:
    """Return the operation that copies `given[r]` of rank `root` into rank r's `tensor`."""
    if participant.rank == root:
        _check_count("scatter", given or (), participant)
    partners = algorithms.one_to_others(participant.rank, participant.world, root)
    description = f"scatter from rank {root} of {tensor.dtype}"
    return Exchange(participant, description, partners, given=dict(enumerate(given or ())), wanted={root: tensor})


def all_to_all(participant: Participant, outs: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> Operation:
    """Return the operation that copies rank r's `given[rank]` into `outs[r]`."""
    _check_count("all_to_all", outs, participant)
    _check_count("all_to_all", given, participant)
    partners = algorithms.all_to_all(participant.rank, participant.world)
    return Exchange(
        participant,
        f"all_to_all of {given[0].dtype}",
        partners,
        given=dict(enumerate(given)),
        wanted=dict(enumerate(outs)),
    )


def reduce(participant: Participant, tensor: torch.Tensor, root: int, reduction: Reduction) -> Operation:
    """Return the operation that reduces all ranks' tensors into rank `root`'s."""
    check_reduction(reduction, tensor)
    partners = algorithms.others_to_one(participant.rank, participant.world, root)
    description = f"reduce ({reduction}) to rank {root} of {describe(tensor)}"
    given = dict.fromkeys([*partners.to, participant.rank], tensor)
    out = tensor if participant.rank == root else None
    return ExchangeReduce(participant, description, partners, given=given, out=out, reduction=reduction)


def reduce_scatter(
    participant: Participant, out: torch.Tensor, given: Sequence[torch.Tensor], reduction: Reduction
) -> Operation:
    """Return the operation that reduces all ranks' `given[rank]` into `out`."""
    check_reduction(reduction, out)
    _check_count("reduce_scatter", given, participant)
    partners = algorithms.all_to_all(participant.rank, participant.world)
    description = f"reduce_scatter ({reduction}) of {out.dtype}"
    return ExchangeReduce(
        participant, description, partners, given=dict(enumerate(given)), out=out, reduction=reduction
    )


def all_reduce(participant: Participant, tensor: torch.Tensor, reduction: Reduction) -> Operation:
    """Return the operation that reduces all ranks' tensors in place, by the algorithm chosen for their size."""
    check_reduction(reduction, tensor)
    description = f"all_reduce ({reduction}) of {describe(tensor)}"
    choice, _reason = algorithms.choose_all_reduce(
        tensor.nbytes, participant.world, pulled=participant.stage is not None, hosts=participant.hosts
    )
    if choice is AllReduce.TWO_LEVELS:
        return TwoLevelReduce(participant, description, tensor, reduction)
    if choice is AllReduce.SCATTER_GATHER:
        return ScatterGatherReduce(participant, description, tensor, reduction)
    if choice is AllReduce.PIPELINE:
        return PulledReduce(participant, description, tensor, reduction)
    partners = algorithms.all_to_all(participant.rank, participant.world)
    given = dict.fromkeys(range(participant.world), tensor)
    return ExchangeReduce(participant, description, partners, given=given, out=tensor, reduction=reduction)


def _check_count(what: str, tensors: Sequence[torch.Tensor], participant: Participant) -> None:
    if len(tensors) != participant.world:
        raise ValueError(f"{what} needs one tensor for each of {participant.world} ranks; got {len(tensors)}")
