"""Who sends which elements to whom in which round of a collective: plain values of rank, world and size.

No tensors, sockets or clocks. A collective is a fixed list of rounds; in each, a rank first sends, then waits for one
message from every rank that it awaits. The order of summation is the tree below, the same on every rank and for every
algorithm, so that results are bitwise equal everywhere whichever is chosen.
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
_KEPT = 256  # answers of the functions that the same operation asks again and again
_CUT_ELEMENTS = 64  # slices begin at multiples of this: full cache lines for every dtype


class Transfer(NamedTuple):  # made for each member of a new group, where a frozen dataclass takes four times as long
    """Elements `[start, stop)` of what the round has to offer go to rank `to`."""

    to: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a rank does in one round: sends, then awaits one message of each of `awaits`.

    `again`: all show what they showed before, and the others only count the round. Only where parts are pulled.
    """

    sends: tuple[Transfer, ...] = ()
    awaits: frozenset[int] = frozenset()
    again: bool = False


@dataclass(frozen=True, kw_only=True)
class Partners:
    """The ranks of a collective of one round: `to` which this one sends, in order, and `of` which it receives."""

    to: tuple[int, ...] = ()
    of: frozenset[int] = frozenset()


class AllReduce(enum.Enum):
    EXCHANGE = "exchange"
    SCATTER_GATHER = "scatter-gather"
    PIPELINE = "pipeline"
    TWO_LEVELS = "two levels"


def choose_all_reduce(size_bytes: int, world: int, *, pulled: bool, hosts: Sequence[int] = ()) -> tuple[AllReduce, str]:
    """The algorithm and why. All give the same bits. `pulled`: all members read each other's memory. `hosts`: of every
    rank, where they are on several."""
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
    """Steps `(left, right)`: the sum of `right` is added to that of `left`, in this order; rank 0 holds the result.

    A run of ranks splits as every sum of this package does, see `base.tree`.
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
    """One slice `(start, stop)` of `numel` elements per rank, as even as whole cache lines allow; some may be empty."""
    lines = -(-numel // _CUT_ELEMENTS)
    edges = [min(lines * rank // world * _CUT_ELEMENTS, numel) for rank in range(world)] + [numel]
    return tuple(itertools.pairwise(edges))


@functools.lru_cache(maxsize=_KEPT)
def others(rank: int, world: int) -> tuple[int, ...]:
    """All other ranks, beginning after this one: not everybody starts with the same receiver."""
    return (*range(rank + 1, world), *range(rank))


@functools.lru_cache(maxsize=_KEPT)
def barrier(rank: int, world: int) -> tuple[Round, ...]:
    """Everybody tells rank 0, then rank 0 tells everybody: the fewest messages, which counts where cores are few."""
    if rank == 0:
        rest = others(rank, world)
        return (Round(awaits=frozenset(rest)), Round(sends=tuple([Transfer(to, 0, 0) for to in rest])))
    return (Round(sends=(Transfer(to=0, start=0, stop=0),)), Round(awaits=frozenset({0})))


def one_to_others(rank: int, world: int, root: int) -> Partners:
    """broadcast, scatter"""
    return Partners(to=others(rank, world)) if rank == root else Partners(of=frozenset({root}))


def others_to_one(rank: int, world: int, root: int) -> Partners:
    """gather, reduce"""
    return Partners(of=frozenset(others(rank, world))) if rank == root else Partners(to=(root,))


@functools.lru_cache(maxsize=_KEPT)
def all_to_all(rank: int, world: int) -> Partners:
    """all_gather, all_to_all, reduce_scatter, and the small all_reduce"""
    return Partners(to=others(rank, world), of=frozenset(others(rank, world)))


def scatter_gather(rank: int, world: int, numel: int) -> tuple[Round, ...]:
    """Slice r of everybody goes to rank r, which sums it and gives the sum, a slice of its own, to everybody."""
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
    """`numel` elements in pieces `(start, stop)` of equal length, up to whole cache lines, and at most `longest`."""
    count = -(-numel // longest)
    if not count:
        return ()
    length = -(-numel // (count * _CUT_ELEMENTS)) * _CUT_ELEMENTS
    return tuple((start, min(start + length, numel)) for start in range(0, numel, length))


@functools.lru_cache(maxsize=_KEPT)
def pipeline(rank: int, world: int, chunk_count: int, *, given: int, sums: int) -> tuple[Round, ...]:
    """Rounds in which everybody shows first `given` elements to all, then its `sums`, then both again: two more than
    chunks. Nobody awaits the last one, which only tells that all has been read."""
    rest = others(rank, world)
    awaits = frozenset(rest)
    shows = [
        Round(sends=tuple(Transfer(to=to, start=0, stop=stop) for to in rest), awaits=awaits) for stop in (given, sums)
    ]
    return (*shows, *[Round(awaits=awaits, again=True)] * (chunk_count - 1), Round(again=True))
