"""The view of a torch job, changed in place: who is asked to go on, who is taken in, and torch's own bookkeeping.

Who decides on the new view, and how newcomers' handles reach the others, is the caller's: nothing here reads a store.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from elastrain.comm.errors import Timeout
from elastrain.comm.process_group import ProcessGroup
from elastrain.comm.torch_backend import Session, remember_proofs, session
from elastrain.comm.values import Peer


@dataclass(frozen=True, kw_only=True)
class _Handle:
    peer: Peer
    generation: int

    def encode(self) -> str:
        return json.dumps({**dataclasses.asdict(self.peer), "generation": self.generation})


def _decode(text: str) -> _Handle:
    try:
        told = json.loads(text)
        generation = int(told.pop("generation"))
        return _Handle(peer=Peer(**told), generation=generation)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"expected what elastrain.comm.handle() gave, or a rank; got {text[:80]!r} ({error})"
        ) from None


def handle() -> str:
    """This process as others name it in `reconfigure`: text, to be carried by any means (a store, a pipe, a file).

    A newcomer first makes itself a default group of one that knows the job's secret:
    `init_process_group("elastrain", store=HashStore(), rank=0, world_size=1, pg_options=Options(secret=…))`.
    """
    current = session()
    me = next(peer for peer in current.peers if peer.id == current.communicator.world.me)
    return _Handle(peer=me, generation=current.generation).encode()


def reconfigure(group: dist.ProcessGroup | None, members: Sequence[int | str]) -> None:
    """Make the default group (None: the same) consist of these members, in this order, in place.

    A member is named by its rank so far or by its `handle()`. All of them call this with lists that mean the same:
    survivors may name each other by rank, newcomers name everybody by handle. The same ProcessGroup objects are usable
    afterwards with their new sizes and ranks, and torch's bookkeeping agrees; other groups lose the members that are
    not named, and take in nobody: make a new one, it costs nothing. Newcomers' models and optimizers are the caller's.

    It returns when all have come. Raises ValueError for unusable lists, and MemberLost, Aborted or Timeout when
    somebody failed meanwhile: then the survivors call it again, with the ranks that they have by then.
    """
    if group is not None and group is not dist.group.WORLD:
        raise ValueError(
            "only the default group is reconfigured: the others lose its lost members with it,"
            " and a group with newcomers is made by new_group"
        )
    edit(members)
    _meet(session())


def edit(members: Sequence[int | str]) -> None:
    """As `reconfigure`, without the meeting: the others may not have come so far."""
    current = session()
    remember_proofs(current)
    handles = [_decode(member) for member in members if isinstance(member, str)]
    by_handle = iter(handles)
    peers = tuple(next(by_handle).peer if isinstance(m, str) else _of_rank(current, m) for m in members)
    # The same on all members: each knows a handle of the newest, is of it, or has heard of it.
    newest = max([current.generation, *(told.generation for told in handles)])
    generation = max(newest + 1, current.communicator.newest_generation)
    current.communicator.edit(generation, peers)
    current.generation, current.peers = generation, peers
    _renumber(current)


def _of_rank(current: Session, rank: int) -> Peer:
    if not 0 <= rank < len(current.peers):
        raise ValueError(f"a rank is at least 0 and below {len(current.peers)}; got {rank}")
    return current.peers[rank]


def _renumber(current: Session) -> None:
    new_rank = {peer.id: rank for rank, peer in enumerate(current.peers)}
    book = dist.distributed_c10d._world.pg_group_ranks
    for group in list(book):
        if isinstance(group, ProcessGroup):
            book[group] = {new_rank[member]: rank for rank, member in enumerate(group.group.members)}


def _meet(current: Session) -> None:
    """Wait for all; and let newcomers count groups and steps as the others do: torch names new groups by number."""
    world = dist.distributed_c10d._world
    counts = torch.tensor([world.group_count, current.steps])
    group = current.communicator.world
    group.reduce(counts, "max", root=0)
    group.broadcast(counts, root=0).wait()
    world.group_count, current.steps = (int(count) for count in counts)
    current.agreed = tuple(peer.id for peer in current.peers)
    current.proven.clear()


def monitored_barrier(group: dist.ProcessGroup | None = None, *, timeout: datetime.timedelta | None = None) -> None:
    """A barrier that knows who is missing: Timeout names all ranks that have not come within `timeout`.

    Where one has run out of patience, the others learn it as Aborted, with the same names. `torch.distributed`'s own
    serves Gloo only. Every member tells every other: not for the inside of a training loop.
    """
    chosen: Any = group or dist.group.WORLD
    if not isinstance(chosen, ProcessGroup):
        raise ValueError(f"expected a group of the backend 'elastrain'; got {chosen!r}")
    members = chosen.group.members
    timeout_s = None if timeout is None else timeout.total_seconds()
    try:
        chosen.group.roll_call(timeout_s=timeout_s).wait()
    except Timeout as error:
        ranks = ", ".join(str(rank) for rank, member in enumerate(members) if member in error.missing)
        raise Timeout(f"monitored_barrier: rank {ranks} did not come ({error})", missing=error.missing) from error
