"""Several meshes in one process, polled in turn until something is true or a deadline has passed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.addresses import Frame, MeshConfig, Newer, Peer, PeerLost
from elastrain.comm.wire.mesh import Mesh

Transport = Literal["unix", "tcp"]
SECRET = b"s" * 32
DEADLINE_S = 60.0
"""Only a hang takes so long, on any machine."""


class Cast:
    """Meshes by name, and everything that each has received."""

    def __init__(self, transport: Transport, config: dict[str, float] | None = None) -> None:
        self.transport = transport
        self.config = MeshConfig(transport=transport, **(config or {}))  # type: ignore[arg-type]
        self.meshes: dict[str, Mesh] = {}
        self.events: dict[str, list[Frame | PeerLost | Newer]] = {}

    def add(self, name: str, *, secret: bytes | None = SECRET, beacon: Beacon | None = None, job: str = "job") -> Mesh:
        # TCP is spoken between nodes only: every member gets a node of its own there.
        node = "here" if self.transport == "unix" else f"node-{name}"
        mesh = Mesh(me=name, node=node, job=job, secret=secret, config=self.config, beacon=beacon)
        self.meshes[name], self.events[name] = mesh, []
        return mesh

    def peers(self, names: Iterable[str]) -> list[Peer]:
        return [Peer(id=n, node=self.meshes[n].node, address=self.meshes[n].address) for n in names]

    def edit(self, generation: int, names: Iterable[str]) -> None:
        names = list(names)
        for name in names:
            self.meshes[name].edit(generation, self.peers(names))

    def together(self, generation: int, names: str) -> None:
        """Edit, and wait until all links carry frames."""
        self.edit(generation, names)
        for name in names:
            for other in names:
                self.meshes[name].send(other, 1, b"hello")
        self.until(lambda: all(self.count(n, body=b"hello", generation=generation) == len(names) for n in names))
        for name in names:
            self.events[name].clear()

    def until(self, claim: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not claim():
            assert time.monotonic() < deadline_s, f"not reached within {DEADLINE_S} s: {self.events}"
            for name in list(self.meshes):
                self.events[name] += self.meshes[name].poll(0.001)

    def frames(self, name: str) -> list[Frame]:
        return [event for event in self.events[name] if isinstance(event, Frame)]

    def count(self, name: str, *, body: bytes, generation: int) -> int:
        return sum(frame.body == body and frame.generation == generation for frame in self.frames(name))

    def lost(self, name: str) -> dict[str, str]:
        return {event.member: event.reason for event in self.events[name] if isinstance(event, PeerLost)}

    def newer(self, name: str) -> list[int]:
        return [event.generation for event in self.events[name] if isinstance(event, Newer)]

    def leave(self, name: str) -> None:
        self.meshes.pop(name).close()

    def close(self) -> None:
        for name in list(self.meshes):
            self.leave(name)


@contextmanager
def cast(transport: Transport, names: str = "", **config: float | bool) -> Iterator[Cast]:
    made = Cast(transport, config)
    try:
        for name in names:
            made.add(name)
        if names:
            made.together(1, names)
        yield made
    finally:
        made.close()
