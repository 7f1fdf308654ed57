"""The rounds of each collective: which rank sends which elements to which rank. Plain values of rank, world and size.

A collective is a fixed list of rounds. In each round a rank first sends, then waits for one message from every rank
that it awaits. The order of summation is `tree`, the same on every rank and for every algorithm, so results are bitwise
equal everywhere whichever algorithm is chosen. No tensors, sockets or clocks.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elastrain.base.arithmetic import split_at

_EXCHANGE_MAX_BYTES = 32 << 10
_PULLED_EXCHANGE_MAX_BYTES = 64 << 10
_KEPT = 256  # cached results per function: the same operation asks for them again and again
_CUT_ELEMENTS = 64  # slices begin at multiples of this: full cache lines for every dtype


class Transfer(NamedTuple):  # made for each member of a new group, where a frozen dataclass takes four times as long
    """A transfer of elements `[start, stop)` of the tensor that the round offers, to rank `to`."""

    to: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of one rank: it sends, then awaits one message from each rank in `awaits`.

    `again`: every rank offers the same elements as in the round before, and the others only count the round. Used only
    where members read each other's memory.
    """

    sends: tuple[Transfer, ...] = ()
    awaits: frozenset[int] = frozenset()
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Partners:
    """Partners of a rank in a collective of one round: it sends to `to`, in order, and receives from `of`."""

    to: tuple[int, ...] = ()
    of: frozenset[int] = frozenset()


class AllReduce(enum.Enum):
    """Algorithm of an all_reduce."""

    EXCHANGE = "exchange"
    SCATTER_GATHER = "scatter-gather"
    PIPELINE = "pipeline"
    TWO_LEVELS = "two levels"


def choose_all_reduce(size_bytes: int, world: int, *, pulled: bool, hosts: Sequence[int] = ()) -> tuple[AllReduce, str]:
    """Choose the algorithm of an all_reduce; returns it with the reason. All algorithms give the same bits.

    `pulled`: all members read each other's memory. `hosts`: the host of every rank, empty if all are on one host.
    """
    if size_bytes <= (_PULLED_EXCHANGE_MAX_BYTES if pulled else _EXCHANGE_MAX_BYTES) or world == 1:
        return AllReduce.EXCHANGE, f"{size_bytes} bytes: one round costs less than the sums that every rank repeats"
    if pulled:
        return AllReduce.PIPELINE, f"{size_bytes} bytes: each of {world} ranks sums one slice of every chunk"
    if 1 < len(set(hosts)) < world:
        return (
            AllReduce.TWO_LEVELS,
            f"{size_bytes} bytes: sums of each of {len(set(hosts))} hosts travel, not of each rank",
        )
    return AllReduce.SCATTER_GATHER, f"{size_bytes} bytes: each of {world} ranks sums one slice"


@functools.lru_cache(maxsize=_KEPT)
def tree(world: int) -> tuple[tuple[int, int], ...]:
    """Return the steps of the summation: step `(left, right)` adds the sum of `right` to that of `left`, in this order.

    Rank 0 holds the result. A run of ranks is halved as in every sum of this package, see `arithmetic.split_at`.
    """
    steps: list[tuple[int, int]] = []
    _fold(0, world, steps)
    return tuple(steps)


def _fold(start: int, stop: int, steps: list[tuple[int, int]]) -> None:
    if stop - start > 1:
        middle = split_at(start, stop)
        _fold(start, middle, steps)
        _fold(middle, stop, steps)
        steps.append((start, middle))


@functools.lru_cache(maxsize=_KEPT)
def cut(numel: int, world: int) -> tuple[tuple[int, int], ...]:
    """Cut `numel` elements into one slice `(start, stop)` per rank, as even as whole cache lines allow, or empty."""
    lines = -(-numel // _CUT_ELEMENTS)
    edges = [min(lines * rank // world * _CUT_ELEMENTS, numel) for rank in range(world)] + [numel]
    return tuple(itertools.pairwise(edges))


@functools.lru_cache(maxsize=_KEPT)
def others(rank: int, world: int) -> tuple[int, ...]:
    """Return all other ranks, beginning after this one, so that ranks do not all send to the same receiver first."""
    return (*range(rank + 1, world), *range(rank))


@functools.lru_cache(maxsize=_KEPT)
def barrier(rank: int, world: int) -> tuple[Round, ...]:
    """Return the rounds of a barrier: all ranks tell rank 0, then rank 0 tells all ranks.

    This takes the fewest messages, which matters on hosts with few cores.
    """
    if rank == 0:
        rest = others(rank, world)
        return (Round(awaits=frozenset(rest)), Round(sends=tuple([Transfer(to, 0, 0) for to in rest])))
    return (Round(sends=(Transfer(to=0, start=0, stop=0),)), Round(awaits=frozenset({0})))


def one_to_others(rank: int, world: int, root: int) -> Partners:
    """Return the partners of a rank in broadcast and scatter."""
    return Partners(to=others(rank, world)) if rank == root else Partners(of=frozenset({root}))


def others_to_one(rank: int, world: int, root: int) -> Partners:
    """Return the partners of a rank in gather and reduce."""
    return Partners(of=frozenset(others(rank, world))) if rank == root else Partners(to=(root,))


@functools.lru_cache(maxsize=_KEPT)
def all_to_all(rank: int, world: int) -> Partners:
    """Return the partners of a rank in all_gather, all_to_all, reduce_scatter and the small all_reduce."""
    return Partners(to=others(rank, world), of=frozenset(others(rank, world)))


def scatter_gather(rank: int, world: int, numel: int) -> tuple[Round, ...]:
    """Return the two rounds of a large all_reduce by messages.

    First, slice r of every rank goes to rank r, which sums it. Then every rank sends its sum to all others.
    """
    slices = cut(numel, world)
    rest = others(rank, world)
    own = slices[rank][1] - slices[rank][0]
    scatter = Round(
        sends=tuple(Transfer(to=to, start=slices[to][0], stop=slices[to][1]) for to in rest), awaits=frozenset(rest)
    )
    gather = Round(sends=tuple(Transfer(to=to, start=0, stop=own) for to in rest), awaits=frozenset(rest))
    return (scatter, gather)


@functools.lru_cache(maxsize=_KEPT)
def chunks(numel: int, longest: int) -> tuple[tuple[int, int], ...]:
    """Cut `numel` elements into pieces `(start, stop)` of equal length, in whole cache lines and at most `longest`."""
    count = -(-numel // longest)
    if not count:
        return ()
    length = -(-numel // (count * _CUT_ELEMENTS)) * _CUT_ELEMENTS
    return tuple((start, min(start + length, numel)) for start in range(0, numel, length))


@functools.lru_cache(maxsize=_KEPT)
def pipeline(rank: int, world: int, chunk_count: int, *, given: int, sums: int) -> tuple[Round, ...]:
    """Return the rounds of an all_reduce in chunks, by members that read each other's memory.

    Every rank shows `given` elements, then its `sums`, then both again: two rounds more than there are chunks. No rank
    awaits the last round, which only says that this rank has read everything.
    """
    rest = others(rank, world)
    awaits = frozenset(rest)
    shows = [
        Round(sends=tuple(Transfer(to=to, start=0, stop=stop) for to in rest), awaits=awaits) for stop in (given, sums)
    ]
    return (*shows, *[Round(awaits=awaits, again=True)] * (chunk_count - 1), Round(again=True))
