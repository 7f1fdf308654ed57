"""The backend "elastrain" of torch.distributed: bootstrap over torch's store, and changes of the view in place.

    import elastrain.comm.torch_backend
    torch.distributed.init_process_group("elastrain")

The store is read when a default group is made, never afterwards. One communicator serves all groups of a process.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from elastrain.comm.autoload import NAME, register
from elastrain.comm.communicator import Communicator
from elastrain.comm.liveness import Beacon
from elastrain.comm.mesh import Mesh, MeshConfig, Peer
from elastrain.comm.process_group import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Options:
    """For `init_process_group(pg_options=…)`. Members that name the same `node` share memory; default: the host."""

    mesh: MeshConfig | None = None
    node: str | None = None


@dataclass(kw_only=True)
class Session:
    """What the default group brought about. `steps`: made by `surviving`."""

    communicator: Communicator
    beacon: Beacon
    peers: tuple[Peer, ...]  # by rank
    generation: int
    timeout_s: float
    steps: int = 0


_session: Session | None = None  # one default group per process is torch's own rule


def create(opts: Any, options: Options | None) -> ProcessGroup:
    """Called by torch for each group that this process belongs to."""
    global _session
    if not opts.global_ranks_in_group:
        _session = _start(opts, options or Options())
        return ProcessGroup(_session.communicator.world, opts.group_id, on_shutdown=_stop)
    if _session is None:
        raise RuntimeError(f"a {NAME} group needs a default group of the same backend")
    members = [_session.peers[rank].id for rank in opts.global_ranks_in_group]
    return ProcessGroup(_session.communicator.group(opts.group_id, members), opts.group_id)


def _start(opts: Any, options: Options) -> Session:
    rank, world, store = opts.group_rank, opts.group_size, opts.store
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    secret = bytes.fromhex(store.get("secret").decode())
    config = options.mesh or MeshConfig(transport="tcp", bind_host=_own_address())
    beacon = Beacon()
    me = f"rank{rank:05d}-{secrets.token_hex(4)}"
    mesh = Mesh(me=me, node=options.node or _host(), job="torch", secret=secret, config=config, beacon=beacon)
    communicator = Communicator(mesh, timeout_s=opts.timeout.total_seconds())
    mine = Peer(id=me, node=mesh.node, address=mesh.address)
    store.set(f"member/{rank}", json.dumps(dataclasses.asdict(mine)))
    peers = tuple(Peer(**json.loads(store.get(f"member/{other}"))) for other in range(world))
    communicator.edit(1, peers)
    communicator.world.barrier().wait()
    return Session(
        communicator=communicator, beacon=beacon, peers=peers, generation=1, timeout_s=opts.timeout.total_seconds()
    )


def _stop() -> None:
    global _session
    if _session is not None:
        _session.communicator.close()
        _session.beacon.close()
        _session = None


def _host() -> str:
    """Names the host and its network namespace: members of one node reach each other by abstract UNIX sockets."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _own_address() -> str:
    """The address of the interface that leads to the job's first host; loopback where that is this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 1))  # sends nothing
        return str(probe.getsockname()[0])


def session() -> Session:
    """Raises RuntimeError where there is no default group of this backend."""
    if _session is None:
        raise RuntimeError(f"there is no default group of the backend {NAME}: call init_process_group({NAME!r}) first")
    return _session


def reconfigure(survivors: Sequence[int]) -> None:
    """Go on with these ranks of the default group, in this order: rank `survivors[i]` becomes rank i.

    The same ProcessGroup objects are usable afterwards, with their new sizes and ranks, and torch's bookkeeping agrees;
    groups lose the members that are not named. All survivors call it with the same list. It ends with a barrier; a
    member lost meanwhile makes it raise MemberLost, and the survivors call it again. Raises ValueError for unusable
    lists.
    """
    edit(survivors)
    session().communicator.world.barrier().wait()


def edit(survivors: Sequence[int]) -> None:
    """As `reconfigure`, without the barrier: the others may not have come so far."""
    current = session()
    peers = tuple(current.peers[rank] for rank in survivors)
    generation = max(current.generation + 1, current.communicator.newest_generation)
    current.communicator.edit(generation, peers)
    current.generation, current.peers = generation, peers
    _renumber(current)


def _renumber(current: Session) -> None:
    new_rank = {peer.id: rank for rank, peer in enumerate(current.peers)}
    book = dist.distributed_c10d._world.pg_group_ranks
    for group in list(book):
        if isinstance(group, ProcessGroup):
            book[group] = {new_rank[member]: rank for rank, member in enumerate(group.group.members)}


register()
# Who ends without destroy_process_group still leaves in good order.
atexit.register(_stop)
