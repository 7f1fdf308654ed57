"""Start of the backend "elastrain" of torch.distributed over torch's store. `view_change` changes the view later.

    import elastrain.comm
    torch.distributed.init_process_group("elastrain")

The store is read when a default group is made, never afterwards. One communicator serves all groups of a process.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import json
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Any

from elastrain.base.environment import master_address, member, read_environment, run_folder
from elastrain.base.environment import secret as launcher_secret
from elastrain.comm.autoload import NAME, register
from elastrain.comm.errors import CommError
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.shm.group_trails import GroupTrails
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.torch_backend.process_group import ProcessGroup
from elastrain.comm.wire.addresses import LossCause, MeshConfig, Peer
from elastrain.comm.wire.handshake import dial
from elastrain.comm.wire.mesh import Mesh

_AGENT_TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for `init_process_group(pg_options=…)`.

    `node`: members that name the same one share memory; default: the host. `secret`: the job's, for jobs that newcomers
    join later; by default the launcher's. Without a launcher rank 0 invents one, and torch's store tells it to
    each rank that asks.
    """

    mesh: MeshConfig | None = None
    node: str | None = None
    secret: bytes | None = None


@dataclass(kw_only=True)
class Session:
    """The communicator and the view of the default group. `steps`: optimizer steps made by `surviving`."""

    communicator: Communicator
    beacon: Beacon
    peers: tuple[Peer, ...]  # by rank
    generation: int
    timeout_s: float
    agreed: tuple[str, ...]  # the members of the last view that was found to be everybody's
    proven: set[str] = field(default_factory=set)  # of these, the members known to take part in nothing any more
    steps: int = 0
    trails: GroupTrails | None = None


_session: Session | None = None  # one default group per process is torch's own rule


def create(opts: Any, options: Options | None) -> ProcessGroup:
    """Make the group for torch, which calls this for each group that this process belongs to."""
    global _session
    if not opts.global_ranks_in_group:
        _session = _start(opts, options or Options())
        return ProcessGroup(_session.communicator.world, opts.group_id, on_shutdown=_stop)
    if _session is None:
        raise RuntimeError(f"a {NAME} group needs a default group of the same backend")
    members = [_session.peers[rank].id for rank in opts.global_ranks_in_group]
    group = _session.communicator.group(opts.group_id, members, timeout_s=opts.timeout.total_seconds())
    return ProcessGroup(group, opts.group_id)


def _start(opts: Any, options: Options) -> Session:
    rank, world, store = opts.group_rank, opts.group_size, opts.store
    secret = options.secret or launcher_secret() or _share_secret(rank, store)
    config = options.mesh or MeshConfig(transport="tcp", bind_host=_own_address())
    beacon = Beacon()
    me = f"rank{rank:05d}-{secrets.token_hex(4)}"
    mesh = Mesh(me=me, node=options.node or _host(), job="torch", secret=secret, config=config, beacon=beacon)
    trails = _trails()
    communicator = Communicator(mesh, timeout_s=opts.timeout.total_seconds(), trails=trails)
    mine = Peer(id=me, node=mesh.node, address=mesh.address)
    store.set(f"member/{rank}", json.dumps(dataclasses.asdict(mine)))
    peers = tuple(Peer(**json.loads(store.get(f"member/{other}"))) for other in range(world))
    communicator.edit(1, peers)
    communicator.world.barrier().wait()
    return Session(
        communicator=communicator,
        beacon=beacon,
        peers=peers,
        generation=1,
        timeout_s=opts.timeout.total_seconds(),
        agreed=tuple(peer.id for peer in peers),
        trails=trails,
    )


def _trails() -> GroupTrails | None:
    """Return the file of group trails, beside the stack dumps of this member.

    Returns None without a launcher, or if the file cannot be created: a job works without it.
    """
    folder = run_folder()
    if folder is None:
        return None
    try:
        (folder / "stacks").mkdir(mode=0o700, exist_ok=True)
        return GroupTrails(folder / "stacks" / f"{member()}.groups")
    except OSError:
        return None


def _share_secret(rank: int, store: Any) -> bytes:
    if rank == 0:
        store.set("secret", secrets.token_hex(32))
    return bytes.fromhex(store.get("secret").decode())


def _stop() -> None:
    global _session
    if _session is not None:
        _session.communicator.close()
        _session.beacon.close()
        if _session.trails is not None:
            _session.trails.remove()
        _session = None


def _host() -> str:
    """Return a name of the host and its network namespace: members of one node use abstract UNIX sockets."""
    with open("/proc/sys/kernel/random/boot_id") as boot_id:
        return f"{boot_id.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _own_address() -> str:
    """Return the address of the interface to the job's first host; loopback if that is this host."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master_address(), 1))  # sends nothing
        return str(probe.getsockname()[0])


def session() -> Session:
    """Return the session. Raises RuntimeError without a default group of this backend."""
    if _session is None:
        raise RuntimeError(f"there is no default group of the backend {NAME}: call init_process_group({NAME!r}) first")
    return _session


@functools.cache
def tell_launcher() -> None:
    """Open a channel to the launcher's agent, so that it lets the survivors of a loss go on. Only the first call acts.

    The channel stays open as long as the process. Nothing happens without an agent, or if it does not answer.
    """
    here = read_environment()
    if here.agent is None:
        return
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect("\0" + here.agent)
        dial(sock, secret=here.secret, job=here.scope, me=here.member, timeout_s=_AGENT_TIMEOUT_S)
        sock.detach()
    except (OSError, CommError):
        sock.close()


def remember_proofs(current: Session) -> None:
    """Keep which members are proven gone. Call this before an edit, which forgets the causes of losses."""
    lost = current.communicator.failures.lost
    current.proven |= {member for member, cause in lost.items() if cause in (LossCause.DEAD, LossCause.LEFT)}


register()
# A process that ends without destroy_process_group still leaves in good order.
atexit.register(_stop)
