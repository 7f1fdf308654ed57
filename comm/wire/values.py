"""The values that a mesh takes and gives: its members, what arrived, what is allowed. No behaviour."""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass
from typing import Literal

import torch

from elastrain.comm.wire.frames import Caps


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A member as the others know it. `address` is what its mesh's `address` says."""

    id: str
    node: str
    address: str


@dataclass(frozen=True, kw_only=True)
class Credentials:
    """Credentials that both ends of a link must have alike. `secret`: None where strangers cannot connect anyway."""

    job: str
    secret: bytes | None


@dataclass(frozen=True, kw_only=True)
class Frame:
    """An incoming message. Tensors that came by reference are read-only views of the sender's memory."""

    source: str
    generation: int
    kind: int
    body: bytes
    tensors: tuple[torch.Tensor, ...]


class LossCause(enum.Enum):
    """How a member was lost, as far as it is known."""

    BROKEN = "broken"  # its link failed; it may be alive
    DEAD = "dead"  # its process has ended, that is proven
    LEFT = "left"  # it closed its mesh in good order, after everything that it had to say; or nobody listens there now
    UNREACHED = (
        "unreached"  # no first connection to it came about: an error for whatever needs one, and for nothing else
    )
    LEFT_US_OUT = "left us out"  # it is alive and went on without us


@dataclass(frozen=True, kw_only=True)
class PeerLost:
    """A peer's link broke or its process died; told once per view, and again should others know better how.

    `at_s`: time.monotonic() when it became known.
    """

    member: str
    reason: str
    at_s: float
    cause: LossCause = LossCause.BROKEN


@dataclass(frozen=True, kw_only=True)
class Newer:
    """Somebody is in a newer generation already: read the view. Told once per generation."""

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
    max_body_bytes: int = 16 << 20
    max_tensor_bytes: int = 8 << 30
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
            if not isinstance(value, str | bool) and value <= 0:
                raise ValueError(f"{name} must be positive; got {value}")

    @property
    def loopback(self) -> bool:
        return self.transport == "unix" or ipaddress.ip_address(self.bind_host).is_loopback

    @property
    def caps(self) -> Caps:
        return Caps(max_body_bytes=self.max_body_bytes, max_tensor_bytes=self.max_tensor_bytes)
