"""Changes the view of a torch job in place: members that go on, members that are taken in, and torch's bookkeeping.

The caller decides on the new view, and brings newcomers' handles to the others: nothing here reads a store.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from elastrain.comm.errors import Timeout
from elastrain.comm.groups.communicator import PendingEdit
from elastrain.comm.torch_backend.bootstrap import Session, remember_proofs, session
from elastrain.comm.torch_backend.process_group import ProcessGroup
from elastrain.comm.wire.addresses import Peer


@dataclass(frozen=True, kw_only=True)
class _Counts:
    """Counts that newcomers continue: views, steps of `surviving`, groups, by whose number torch names new ones."""

    generation: int
    steps: int
    groups: int


@dataclass(frozen=True, kw_only=True)
class _Handle:
    peer: Peer
    counts: _Counts


def _decode(text: str) -> _Handle:
    try:
        told = json.loads(text)
        return _Handle(peer=Peer(**told["peer"]), counts=_Counts(**told["counts"]))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"expected what elastrain.comm.handle() gave, or a rank; got {text[:80]!r} ({error})"
        ) from None


def handle() -> str:
    """Return this process as text that others pass to `reconfigure`, by any means (a store, a pipe, a file).

    It is valid until the next step, view or new group, so ask for a new one each time.

    A newcomer first makes a default group of its own, with the job's secret: `init_process_group("elastrain",
    store=HashStore(), rank=0, world_size=1, pg_options=Options(secret=…))`.
    """
    current = session()
    me = next(peer for peer in current.peers if peer.id == current.communicator.world.me)
    return json.dumps(dataclasses.asdict(_Handle(peer=me, counts=_counts(current))))


def _counts(current: Session) -> _Counts:
    groups = dist.distributed_c10d._world.group_count
    return _Counts(generation=current.generation, steps=current.steps, groups=groups)


def _newest(mine: _Counts, handles: Iterable[_Handle]) -> _Counts:
    of_all = [mine, *[told.counts for told in handles]]
    generation, steps, groups = map(max, *map(dataclasses.astuple, of_all))
    return _Counts(generation=generation, steps=steps, groups=groups)


def reconfigure(group: dist.ProcessGroup | None, members: Sequence[int | str]) -> None:
    """Change the default group (None: the same) to these members, in this order, in place.

    Returns when all members have come. The same ProcessGroup objects have new sizes and ranks afterwards. Other groups
    lose the members that are not named and gain none; make a new group instead. The caller brings newcomers' models and
    optimizers up to date. Raises ValueError for unusable lists, and MemberLost, Aborted or Timeout if a member failed
    in the meantime: then the survivors call this again, with their present ranks.

    Args:
        group: The default group, or None.
        members: Each member by its rank so far or its `handle()`. All members pass equivalent lists: survivors may name
            each other by rank, newcomers name all members by handle.
    """
    if group is not None and group is not dist.group.WORLD:
        raise ValueError(
            "only the default group is reconfigured: the others lose its lost members with it,"
            " and a group with newcomers is made by new_group"
        )
    current = session()
    editing = _begin(current, members)
    agreement = f"barrier after step {current.steps}, with {dist.distributed_c10d._world.group_count} groups made"
    _finish(current, editing)
    # In this thread: on a host with few cores each change of threads takes longer than the barrier itself.
    current.communicator.world.barrier(description=agreement, inline=True).wait()
    current.agreed = current.communicator.world.members
    current.proven.clear()


def edit(members: Sequence[int | str]) -> None:
    """Change the view as `reconfigure` does, without waiting for the others: they may not have come so far."""
    current = session()
    _finish(current, _begin(current, members))


@dataclass(frozen=True, kw_only=True)
class _Editing:
    work: PendingEdit
    generation: int
    peers: tuple[Peer, ...]


def _begin(current: Session, members: Sequence[int | str]) -> _Editing:
    remember_proofs(current)
    handles = {member: _decode(member) for member in members if isinstance(member, str)}
    known: dict[int | str, Peer] = dict(enumerate(current.peers))
    known.update({text: told.peer for text, told in handles.items()})
    try:
        peers = tuple([known[member] for member in members])
    except KeyError as error:
        raise ValueError(f"a rank is at least 0 and below {len(current.peers)}; got {error}") from None
    # The same on all members: each knows a handle of the newest, is of it, or has heard of it.
    counts = _newest(_counts(current), handles.values()) if handles else None
    newest = current.generation if counts is None else counts.generation
    generation = max(newest + 1, current.communicator.newest_generation)
    work = current.communicator.begin_edit(generation, peers)
    if counts is not None:
        current.steps, dist.distributed_c10d._world.group_count = counts.steps, counts.groups
    return _Editing(work=work, generation=generation, peers=peers)


def _finish(current: Session, editing: _Editing) -> None:
    editing.work.wait()
    current.generation, current.peers = editing.generation, editing.peers
    _renumber(current)


def _renumber(current: Session) -> None:
    new_rank = {peer.id: rank for rank, peer in enumerate(current.peers)}
    book = dist.distributed_c10d._world.pg_group_ranks
    for group in list(book):
        if isinstance(group, ProcessGroup):
            book[group] = {new_rank[member]: rank for rank, member in enumerate(group.group.members)}


def monitored_barrier(group: dist.ProcessGroup | None = None, *, timeout: datetime.timedelta | None = None) -> None:
    """Wait until all members have come; Timeout names all ranks that have not come within `timeout`.

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
