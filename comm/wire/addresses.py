"""Plain values of a mesh: members, events and settings, the order of members, and their ring.

Losses and newer views travel along the ring in both directions,
and lost members are skipped. Only stopped neighbours tear the ring, into at most as many pieces as there are of them.
"""

from __future__ import annotations

import collections
import enum
import ipaddress
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from elastrain.comm.wire.frames import Caps


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A member as others know it. `address` is its mesh's `address`."""

    id: str
    node: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Job and secret, equal at both ends of a link. `secret` is None where strangers cannot connect."""

    job: str
    secret: bytes | None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """An incoming message. Tensors sent by reference are read-only views of the sender's memory."""

    source: str
    generation: int
    kind: int
    body: bytes
    tensors: tuple[torch.Tensor, ...]


class LossCause(enum.Enum):
    """Cause of the loss of a member, as far as it is known."""

    BROKEN = "broken"  # its link failed; it may be alive
    DEAD = "dead"  # its process has ended, that is proven
    LEFT = "left"  # it closed its mesh in good order after its last message; or no process listens there now
    UNREACHED = (
        "unreached"  # no first connection to it came about: an error for whatever needs one, and for nothing else
    )
    LEFT_US_OUT = "left us out"  # it is alive and went on without us


@dataclass(frozen=True, kw_only=True)
class PeerLost:
    """Loss of a peer, told once per view, and again if another member knows the cause better.

    `at_s`: time.monotonic() when it became known.
    """

    member: str
    reason: str
    at_s: float
    cause: LossCause = LossCause.BROKEN


@dataclass(frozen=True, kw_only=True)
class Newer:
    """Notice that a member is in a newer generation, told once per generation: read the view."""

    generation: int


Event = Frame | PeerLost | Newer


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Settings of a mesh.

    `transport`: "unix" when all members are on this host; "tcp" between nodes (and UNIX sockets inside a node).

    `bind_host` is the interface's address, and what peers connect to. A TCP peer that does not acknowledge for
    `tcp_silence_s` is lost. `max_held_frames` counts per link; a link that has so many of a newer generation is not
    read until the next edit. A link whose unsent bytes exceed `max_send_queue_bytes` is lost: its reader is stuck.
    `holds_newer`: False gives frames of newer generations to the reader at once, which keeps them for later and learns
    by them which members have gone on.
    `huge_pages`: for large tensors in shared memory. They make collectives faster, and a process larger: they count as
    held as soon as they are there.
    """

    transport: Literal["unix", "tcp"] = "unix"
    bind_host: str = "127.0.0.1"
    connect_timeout_s: float = 10.0
    handshake_timeout_s: float = 5.0
    tcp_silence_s: float = 5.0
    ports: tuple[int, int] | None = None
    """First and last port at which the mesh may listen, or None for any."""
    caps: Caps = Caps()
    """Limits of a frame."""
    max_held_frames: int = 4096
    holds_newer: bool = True
    max_send_queue_bytes: int = 16 << 30
    segment_bytes: int = 64 << 20
    huge_pages: bool = True

    def __post_init__(self) -> None:
        if self.transport not in ("unix", "tcp"):
            raise ValueError(f"transport is 'unix' or 'tcp'; got {self.transport!r}")
        ipaddress.ip_address(self.bind_host)  # raises ValueError with a sentence: a name could mean any interface
        for name, value in vars(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise ValueError(f"{name} must be positive; got {value}")

    @property
    def loopback(self) -> bool:
        """True if only this host can connect."""
        return self.transport == "unix" or ipaddress.ip_address(self.bind_host).is_loopback


def in_order(member: str) -> tuple[int, str]:
    """Return the key of the order of members: ids rise, and shorter ids are older."""
    return len(member), member


def dials(one: str, other: str) -> bool:
    """Return True if `one` opens the link between the two: the later member dials the earlier one."""
    return in_order(one) > in_order(other)


def neighbours(me: str, order: Sequence[str], lost: Collection[str], nodes: Mapping[str, str]) -> frozenset[str]:
    """Return the nearest members on both sides that are not lost; empty if `me` is not in the order, or alone.

    If a lost member next to `me` is on another node, all of that node may be gone. Then its other members up to the
    next node are returned as well, so that they are tried at once.
    """
    if me not in order:
        return frozenset()
    at = order.index(me)
    forward = [*order[at + 1 :], *order[:at]]
    return frozenset({*_along(forward, lost, nodes, nodes[me]), *_along(forward[::-1], lost, nodes, nodes[me])})


def _along(way: Sequence[str], lost: Collection[str], nodes: Mapping[str, str], home: str) -> list[str]:
    found: list[str] = []
    troubled: set[str] = set()
    for member in way:
        node = nodes[member]
        if member in lost:
            troubled.add(node)
            continue
        found.append(member)
        if node == home or node not in troubled:
            break
    return found


class Ring:
    """The ring as one member knows it. `untold`: losses not yet sent to the neighbours."""

    def __init__(self) -> None:
        self.order: tuple[str, ...] = ()  # empty: this view has no ring
        self.neighbours: frozenset[str] = frozenset()
        self.untold: collections.deque[PeerLost] = collections.deque()

    def form(self, members: Collection[str]) -> None:
        """Form the ring of these members."""
        self.order = tuple(sorted(members, key=in_order))

    def shrink(self, gone: Collection[str]) -> None:
        """Remove members."""
        self.order = tuple([member for member in self.order if member not in gone])

    def dissolve(self) -> None:
        """Have no ring in this view."""
        self.order = ()

    def close(self, me: str, lost: Collection[str], nodes: Mapping[str, str]) -> list[str]:
        """Skip lost members; returns the members that became neighbours by this, in order."""
        before, self.neighbours = self.neighbours, neighbours(me, self.order, lost, nodes)
        return [member for member in self.order if member in self.neighbours - before]
