"""The mesh of a member: its links to the other members, and the shared memory that these read."""

from __future__ import annotations

from dataclasses import replace

from elastrain.base.environment import Environment, port_range
from elastrain.comm.wire.addresses import MeshConfig
from elastrain.comm.wire.mesh import Mesh
from elastrain.device.port import DevicePort
from elastrain.runtime.carrying.tensor_memory import PinInPlace
from elastrain.runtime.io.member_connections import Connections

APART_SEGMENT_BYTES = 8 << 20
"""Segment size in jobs with stages, where blocks come and go. Only whole segments are returned to the kernel, so
segments are small: a block of 4 MiB gets one of its own."""


def open_mesh(environment: Environment, connections: Connections, port: DevicePort, *, are_blocks_apart: bool) -> Mesh:
    """Return a mesh that listens at once. Its links are made with the first view.

    It uses no huge pages, because the memory limit counts every byte. It does not hold back messages of newer views.
    The core keeps them, and learns from them which peers have gone on. Else it would wait for these peers.
    """
    config = MeshConfig(huge_pages=False, holds_newer=False)
    if are_blocks_apart:
        config = replace(config, segment_bytes=APART_SEGMENT_BYTES)
    if environment.host:
        config = replace(config, transport="tcp", bind_host=environment.host, ports=port_range())
    mesh = Mesh(
        me=environment.member,
        node=environment.node,
        job=environment.scope,
        secret=environment.secret,
        beacon=connections.beacon,
        config=config,
    )
    if not port.is_host:
        mesh.pin(PinInPlace(port, connections.journal.write))
    if environment.armed:
        mesh.tamper(connections.faults.tools.frame.tamper)
    return mesh
