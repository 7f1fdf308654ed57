"""The communicator of a forked member, which a test tells over a wire what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.addresses import MeshConfig, Peer
from elastrain.comm.wire.mesh import Mesh
from tests.support.comm_processes import Wire
from tests.support.comm_tools import SECRET, Transport


def enter(
    wire: Wire,
    name: str,
    transport: Transport,
    *,
    timeout_s: float = 20.0,
    beacon: Beacon | None = None,
    **config: float,
) -> tuple[Mesh, Communicator]:
    """Make a member in this process, and tell the test how others reach it. Over TCP each has a node of its own."""
    torch.set_num_threads(1)
    node = "here" if transport == "unix" else name
    settings = MeshConfig(transport=transport, **config)  # type: ignore[arg-type]
    mesh = Mesh(me=name, node=node, job="job", secret=SECRET, config=settings, beacon=beacon or Beacon())
    comm = Communicator(mesh, timeout_s=timeout_s)
    wire.say({"id": name, "node": node, "address": mesh.address})
    return mesh, comm


def edit(
    comm: Communicator,
    generation: int,
    peers: Sequence[Mapping[str, str]],
    lists: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Take over a view of members as they have told the test of themselves."""
    comm.edit(generation, [Peer(**peer) for peer in peers], lists)
