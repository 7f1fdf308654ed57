"""Communicators of several members in one process, one thread each."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from elastrain.comm.errors import CommError
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.wire.addresses import MeshConfig, Peer
from elastrain.comm.wire.mesh import Mesh
from tests.support.comm_tools import SECRET, Transport

NAMES = "abcdefgh"


class Party:
    """Communicators by name; `each` runs one function per member at once and collects results or errors."""

    def __init__(self, transport: Transport, **config: float) -> None:
        self.transport = transport
        self.config = MeshConfig(transport=transport, segment_bytes=8 << 20, **config)  # type: ignore[arg-type]
        self.comms: dict[str, Communicator] = {}
        self.meshes: dict[str, Mesh] = {}

    def add(self, name: str) -> Communicator:
        node = "here" if self.transport == "unix" else f"node-{name}"
        self.meshes[name] = Mesh(me=name, node=node, job="job", secret=SECRET, config=self.config)
        self.comms[name] = Communicator(self.meshes[name], timeout_s=20)
        return self.comms[name]

    def view(self, generation: int, names: str) -> None:
        peers = [Peer(id=n, node=self.meshes[n].node, address=self.meshes[n].address) for n in names]
        for name in names:
            self.comms[name].edit(generation, peers)

    def each(self, act: Callable[[Communicator, int], Any], names: str | None = None) -> list[Any]:
        names = "".join(self.comms) if names is None else names
        results: list[Any] = [None] * len(names)

        def run(index: int, name: str) -> None:
            try:
                results[index] = act(self.comms[name], index)
            except (CommError, ValueError) as error:
                results[index] = error

        threads = [threading.Thread(target=run, args=(index, name)) for index, name in enumerate(names)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)  # only a hang takes so long, on any machine
            assert not thread.is_alive(), "a waiter hangs"
        return results

    def close(self) -> None:
        for comm in self.comms.values():
            comm.close()


@contextmanager
def party(transport: Transport, world: int, **config: float) -> Iterator[Party]:
    """`config`: of the meshes, other than their usual values."""
    made = Party(transport, **config)
    try:
        for name in NAMES[:world]:
            made.add(name)
        made.view(1, NAMES[:world])
        yield made
    finally:
        made.close()
