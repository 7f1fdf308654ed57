"""Where the ranks of a group are, and the plan of an all_reduce that sums on each host first: plain values.

`hosts` names the host of every rank, by any numbers. No tensors, sockets or clocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import Round, Transfer

Interval = tuple[int, int]


def ranks_by_host(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, in order; hosts in the order of their first ranks."""
    found: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def tree(hosts: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The order of summation, as `algorithms.tree`: first the ranks of each host, along the tree of their number, then
    the hosts. The same as `algorithms.tree` where each host has one rank, or one has all, or all have the same power of
    two of neighbouring ranks.
    """
    groups = ranks_by_host(hosts)
    within = [(ranks[left], ranks[right]) for ranks in groups for left, right in algorithms.tree(len(ranks))]
    return (*within, *((groups[left][0], groups[right][0]) for left, right in algorithms.tree(len(groups))))


@dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """One rank's part. As many ranks of each host as the smallest has are *owners*: each sums a slice of the tensor.

    Rounds: to the owners of my host; among the owners of a slice, one per host, which sum a piece of it each; their
    pieces back; and from the owners of my host to all on it. Each element crosses between hosts as often as it must.
    """

    rounds: tuple[Round, ...]
    here: tuple[int, ...]  # all ranks of my host
    owners: dict[int, Interval]  # of my host, and their slices
    colleagues: tuple[int, ...]  # owners of my slice, by host; none if I own none
    pieces: dict[int, Interval]  # of theirs, in elements of the slice


def two_levels(rank: int, hosts: Sequence[int], numel: int) -> TwoLevels:
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
