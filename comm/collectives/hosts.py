"""Ranks by host, and the plan of an all_reduce that sums on each host first: plain values.

`hosts` has one number per rank; equal numbers mean the same host. No tensors, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import Round, Transfer

Interval = tuple[int, int]


def ranks_by_host(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host in order. Hosts are ordered by their first ranks."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def tree(hosts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the steps of the summation, as `algorithms.tree`: first within each host, then between the hosts.

    The steps equal those of `algorithms.tree` in three cases: each host has one rank, one host has all ranks, or all
    hosts have the same power of two of neighbouring ranks.
    """
    groups = ranks_by_host(hosts)
    within = [(ranks[left], ranks[right]) for ranks in groups for left, right in algorithms.tree(len(ranks))]
    return (*within, *((groups[left][0], groups[right][0]) for left, right in algorithms.tree(len(groups))))


@dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """One rank's part in the plan. On each host, the same number of ranks are *owners* of one slice each.

    That number is the number of ranks on the smallest host. There are four rounds. (1) Each rank sends the slices to
    the owners on its host. (2) The owners of a slice, one per host, send each other pieces of it, and each sums one
    piece. (3) They send the summed pieces back. (4) Each owner sends its slice to all ranks of its host. Each element
    crosses between hosts only as often as necessary.
    """

    rounds: tuple[Round, ...]
    here: tuple[int, ...]  # all ranks of this host
    owners: dict[int, Interval]  # owners on this host, and their slices
    colleagues: tuple[int, ...]  # owners of this rank's slice, by host; empty if it owns none
    pieces: dict[int, Interval]  # pieces that the colleagues sum, in elements of the slice


def two_levels(rank: int, hosts: Sequence[int], numel: int) -> TwoLevels:
    """Return the plan of `rank` for a tensor of `numel` elements."""
    groups = ranks_by_host(hosts)
    here = next(ranks for ranks in groups if rank in ranks)
    slices = algorithms.cut(numel, min(len(ranks) for ranks in groups))
    owners = dict(zip(here, slices, strict=False))
    mine = here.index(rank)
    colleagues = tuple(ranks[mine] for ranks in groups) if rank in owners else ()
    start, stop = owners.get(rank, (0, 0))
    cuts = algorithms.cut(stop - start, len(groups))
    pieces = dict(zip(colleagues, cuts, strict=False))
    return TwoLevels(
        rounds=_rounds(rank, here, owners, pieces), here=here, owners=owners, colleagues=colleagues, pieces=pieces
    )


def _rounds(
    rank: int, here: Sequence[int], owners: dict[int, Interval], pieces: dict[int, Interval]
) -> tuple[Round, ...]:
    neighbours = frozenset(here) - {rank}
    far = frozenset(pieces) - {rank}
    whole = owners[rank][1] - owners[rank][0] if rank in owners else 0
    own_start, own_stop = pieces.get(rank, (0, 0))
    return (
        Round(
            sends=tuple(Transfer(to=to, start=start, stop=stop) for to, (start, stop) in owners.items() if to != rank),
            awaits=neighbours if rank in owners else frozenset(),
        ),
        Round(
            sends=tuple(Transfer(to=to, start=start, stop=stop) for to, (start, stop) in pieces.items() if to != rank),
            awaits=far,
        ),
        Round(sends=tuple(Transfer(to=to, start=0, stop=own_stop - own_start) for to in sorted(far)), awaits=far),
        Round(
            sends=tuple(Transfer(to=to, start=0, stop=whole) for to in sorted(neighbours)) if rank in owners else (),
            awaits=frozenset(owners) - {rank},
        ),
    )
