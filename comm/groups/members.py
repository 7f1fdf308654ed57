"""Members of a group (`MemberList`), their hosts (`Placement`), kinds of frames, and matching of messages.

`Mailbox` matches tagged messages with receives, in order per group, source and tag. No I/O, no clock.
"""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from elastrain.comm.errors import MemberLost, ProtocolError
from elastrain.comm.shm.group_trails import GroupTrail
from elastrain.comm.shm.shared_memory import waits_available
from elastrain.comm.wire.addresses import Frame, Peer
from elastrain.comm.wire.mesh import Mesh


class MemberList:
    """A group's members in rank order, shared by executors and callers; an edit of the view replaces them.

    `number`: the group's number in frames. `trail`: record of its last operation. Members that use the same name and
    the same list form a group: making one sends no message.
    """

    def __init__(self, name: str, me: str, members: Sequence[str], trail: GroupTrail | None = None) -> None:
        """Make the list. Raises ValueError if it names a member twice, or not this member."""
        self.trail = trail or GroupTrail(name)
        self.name, self.me = name, me
        self.members = tuple(members)
        self.number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        if me not in self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"group {name!r} must list every member once, {me!r} included; got {self.members}")

    @property
    def rank(self) -> int:
        """Rank of this member."""
        return self.members.index(self.me)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.members)


class Placement:
    """Hosts of the members. All members come to the same answers, because only the view decides."""

    def __init__(self, me: str, node: str, *, one_host: bool) -> None:
        """`one_host`: members reach each other by shared memory whatever their nodes are called."""
        self._one_host = one_host
        self._waits, _reason = waits_available()
        self._nodes = {me: node}
        self._numbers: dict[str, int] = {}  # of the members' hosts; none where all are on one

    def renew(self, peers: Sequence[Peer]) -> None:
        """Take over the members of a view."""
        self._nodes = {peer.id: peer.node for peer in peers}
        self._numbers = {} if self._one_host else _numbers(self._nodes)

    def in_memory(self, members: Sequence[str]) -> bool:
        """Return True if these members are all on this host and can wait on each other's memory."""
        nodes = set(map(self._nodes.get, members))
        return self._waits and (len(nodes) == 1 or self._one_host)

    def host_of(self, member: str) -> int:
        """Return the number of the member's host."""
        return self._numbers.get(member, 0)


def _numbers(nodes: Mapping[str, str]) -> dict[str, int]:
    """Return the number of each member's node; empty if there is only one node."""
    names = set(nodes.values())
    numbers = {node: number for number, node in enumerate(sorted(names))} if len(names) > 1 else {}
    return {member: numbers[node] for member, node in nodes.items()} if numbers else {}


class FrameKind(enum.IntEnum):
    """Kind of a frame of a communicator."""

    PART = 0x0101  # of an operation: group, sequence, round, the sender's fence, its description; the tensor
    ABORT = 0x0102  # everything ended: the lost member, if any, and the reason
    FENCE = 0x0103  # the sender's fence, in its shared memory
    MESSAGE = 0x0104  # a tagged message: group, tag; the tensor
    RINGS = 0x0105  # of a group: the sender's slot rings, in its shared memory


def unpack(layout: struct.Struct, frame: Frame) -> tuple[tuple[Any, ...], bytes]:
    """Return the fields at the begin of the body, and the rest of it. Raises ProtocolError."""
    if len(frame.body) < layout.size:
        raise ProtocolError(
            f"a frame of kind {frame.kind:#x} with {len(frame.body)} bytes, {layout.size} were expected"
        )
    return layout.unpack_from(frame.body), frame.body[layout.size :]


def only_tensor(frame: Frame, *, dtype: torch.dtype | None = None, numel: int | None = None) -> torch.Tensor:
    """Return the frame's only tensor; dtype and size are checked if given. Raises ProtocolError."""
    found = frame.tensors
    if len(found) != 1 or (dtype or found[0].dtype) != found[0].dtype or numel not in (None, found[0].numel()):
        came = ", ".join(f"{tensor.dtype}{list(tensor.shape)}" for tensor in found) or "no tensor"
        raise ProtocolError(f"a frame of kind {frame.kind:#x} with {came}")
    return found[0]


def send(mesh: Mesh, member: str, kind: FrameKind, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None:
    """Queue a frame for a member; do nothing if it is lost, because the mesh reports the loss itself."""
    with suppress(MemberLost):
        mesh.send(member, kind, body, tensors)


Message = TypeVar("Message")
Receive = TypeVar("Receive")


@dataclass(frozen=True, kw_only=True)
class Address:
    """Group, source and tag of a message. A receive with source None takes messages from any member."""

    group: int
    source: str | None
    tag: int

    def awaits(self, sent: Address) -> bool:
        """Return True if a receive with this address takes a message with address `sent`."""
        return (self.group, self.tag) == (sent.group, sent.tag) and self.source in (None, sent.source)


@dataclass(kw_only=True)
class Mailbox(Generic[Message, Receive]):
    """Messages without a receive, and receives without a message. No message here fits a receive here."""

    messages: list[tuple[Address, Message]] = field(default_factory=list)
    receives: list[tuple[Address, Receive]] = field(default_factory=list)

    def put(self, sent: Address, message: Message) -> Receive | None:
        """Return the receive for which the message is, or None after keeping the message."""
        for index, (awaited, _) in enumerate(self.receives):
            if awaited.awaits(sent):
                return self.receives.pop(index)[1]
        self.messages.append((sent, message))
        return None

    def take(self, awaited: Address, receive: Receive) -> tuple[Address, Message] | None:
        """Return the first message that fits, or None after keeping the receive."""
        for index, (sent, _) in enumerate(self.messages):
            if awaited.awaits(sent):
                return self.messages.pop(index)
        self.receives.append((awaited, receive))
        return None

    def clear(self) -> list[Receive]:
        """Drop everything; returns the receives that got no message."""
        receives = [receive for _, receive in self.receives]
        self.messages.clear()
        self.receives.clear()
        return receives
