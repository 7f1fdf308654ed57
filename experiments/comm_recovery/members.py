"""Member processes of one trial: a group of `world`, one of whom is killed, and the survivors' way to one without it.

Only the trial comes in here; what the figures mean and how they are divided is in `run`.
"""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

import elastrain.comm
from elastrain.comm.errors import MemberLost
from elastrain.comm.wire.addresses import MeshConfig

LIMIT = datetime.timedelta(seconds=60)
_HOST = "127.0.0.1"
Store = Any  # torch exports its stores untyped
_c10d: Any = torch._C._distributed_c10d


@dataclass(frozen=True, kw_only=True)
class Trial:
    """`wall_s`: from the moment the new view was known to the end of the last survivor's first barrier in it.

    `busiest_s`, `store_s`: processor seconds in that time of the member that used most, and of the store's process.
    """

    wall_s: float
    busiest_s: float
    store_s: float


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a member stands: its rank in `world`, and what finds the others before and after the loss."""

    rank: int
    world: int
    survivors: int
    folder: Path
    port: int
    rehearsal_port: int
    new_port: int


@dataclass(frozen=True, kw_only=True)
class Way:
    """`begin` makes the group of all; `go` leads ranks 0 to `survivors - 1` to their first barrier without the others.

    `notice`: what a survivor does between the kill and the new view, which is not timed.
    """

    begin: Callable[[Place], Any]
    go: Callable[[Place, Any], None]
    notice: Callable[[], None] = lambda: None


def _begin_elastrain(place: Place) -> None:
    options = elastrain.comm.Options(mesh=MeshConfig(transport="tcp", segment_bytes=8 << 20))
    store = _c10d.FileStore(str(place.folder / "store"), place.world)
    dist.init_process_group(
        "elastrain", store=store, rank=place.rank, world_size=place.world, timeout=LIMIT, pg_options=options
    )
    dist.all_reduce(torch.ones(50_000))


def _notice() -> None:
    try:
        dist.barrier()
    except MemberLost:
        pass


def _edit(place: Place, _: Any) -> None:
    elastrain.comm.reconfigure(None, range(place.survivors))


def _client(port: int) -> Store:
    return _c10d.TCPStore(_HOST, port, None, False, timeout=LIMIT)


def _begin_gloo(place: Place) -> Store:
    store = _client(place.port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world, timeout=LIMIT)
    dist.all_reduce(torch.ones(50_000))
    return store


def _rebuild(place: Place, _: Any) -> None:
    dist.destroy_process_group()
    store = _client(place.new_port)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.survivors, timeout=LIMIT)
    dist.barrier()


def _rebuild_partly(place: Place, _: Any) -> None:
    dist.barrier(dist.new_group(list(range(place.survivors)), timeout=LIMIT))


def _begin_torchft(place: Place) -> Any:
    from torchft.process_group import ProcessGroupGloo

    group = ProcessGroupGloo(timeout=LIMIT)
    _reconfigure_torchft(replace(place, survivors=place.world, new_port=place.port), group)
    group.allreduce([torch.ones(50_000)], dist.ReduceOp.SUM).wait()
    return group


def _reconfigure_torchft(place: Place, group: Any) -> None:
    """Without its manager, whose lighthouse would exchange the handles."""
    from torchft.process_group import reconfigure_with_store

    reconfigure_with_store(group, f"{_HOST}:{place.new_port}/handles", place.rank, place.survivors, LIMIT)
    group.barrier(_c10d.BarrierOptions()).wait()


WAYS = {
    "edit": Way(begin=_begin_elastrain, go=_edit, notice=_notice),
    "full": Way(begin=_begin_gloo, go=_rebuild),
    "partial": Way(begin=_begin_gloo, go=_rebuild_partly),
    "torchft": Way(begin=_begin_torchft, go=_reconfigure_torchft),
}


def _live(way: Way, place: Place, wire: Connection) -> None:
    torch.set_num_threads(1)
    begun = way.begin(place)
    way.go(replace(place, survivors=place.world, new_port=place.rehearsal_port), begun)
    wire.send("ready")
    wire.recv()
    way.notice()
    wire.send("noticed")
    wire.recv()
    before_s = time.process_time()
    way.go(place, begun)
    wire.send((time.monotonic(), time.process_time() - before_s))
    wire.recv()
    os._exit(0)  # the groups of the dead need no good-bye


def _host_stores(wire: Connection) -> None:
    """The process beside the members, as an agent of a launcher: a new store is there before anybody looks for it."""
    stores = [_c10d.TCPStore(_HOST, 0, None, True, timeout=LIMIT, wait_for_workers=False) for _ in range(3)]
    wire.send([store.port for store in stores])
    while True:
        wire.recv()
        wire.send(time.process_time())


def trial(name: str, world: int) -> Trial:
    """One loss in a fresh group of `world` forked processes. To be called without threads.

    Raises EOFError or TimeoutError if a member fails or is stuck.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="comm-recovery-")))
        agent, _ = _start(stack, _host_stores)
        ((port, rehearsal_port, new_port),) = _hear([agent])
        places = [
            Place(
                rank=rank,
                world=world,
                survivors=world - 1,
                folder=folder,
                port=port,
                rehearsal_port=rehearsal_port,
                new_port=new_port,
            )
            for rank in range(world)
        ]
        members = [_start(stack, _live, WAYS[name], place) for place in places]
        wires = [wire for wire, _ in members]
        _hear(wires)
        victim = members[-1][1]
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
        survivors = wires[:-1]
        _tell(survivors)
        _hear(survivors)
        before_s = _processor_s(agent)
        known_s = time.monotonic()
        _tell(survivors)
        said = _hear(survivors)
        return Trial(
            wall_s=max(at_s for at_s, _ in said) - known_s,
            busiest_s=max(used_s for _, used_s in said),
            store_s=_processor_s(agent) - before_s,
        )


def _processor_s(agent: Connection) -> float:
    _tell([agent])
    return float(_hear([agent])[0])


def _start(stack: ExitStack, body: Callable[..., None], *values: Any) -> tuple[Connection, Any]:
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe()
    process = fork.Process(target=body, args=(*values, theirs), daemon=True)
    process.start()
    stack.callback(_end, process)
    theirs.close()
    return stack.enter_context(mine), process


def _tell(wires: list[Connection]) -> None:
    for wire in wires:
        wire.send("go")


def _hear(wires: list[Connection]) -> list[Any]:
    for wire in wires:
        if not wire.poll(LIMIT.total_seconds()):
            raise TimeoutError("a member is stuck")
    return [wire.recv() for wire in wires]


def _end(process: Any) -> None:
    process.kill()
    process.join()
