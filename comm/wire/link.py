"""One link: a member's connection, with frames to be sent, lent memory, news from the peer, and its loss.

A link exists from the edit that adds the member to the edit that removes it. It is *opened* when it is needed first;
its stream is attached later and may be lost earlier. `Lending` records which segments and regions the peer can read.
Nothing here knows other members.
"""

from __future__ import annotations

import enum
import math
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.device_segments import DeviceShare, is_on_device
from elastrain.comm.shm.imports import Imports, Reference
from elastrain.comm.shm.liveness import Watcher, watch_beacon
from elastrain.comm.shm.segments import Region, Segment, SharedMemory, TensorPlace
from elastrain.comm.shm.shared_memory import Pin
from elastrain.comm.wire.addresses import Frame, LossCause, Peer, PeerLost
from elastrain.comm.wire.frames import FIRST_CONTROL_KIND, Inline, RawFrame, dtype_supported, encode, tensor_bytes
from elastrain.comm.wire.ports import device_domain
from elastrain.comm.wire.secure import Connection
from elastrain.comm.wire.stream import Outbox, Stream


class Lending:
    """Regions lent to one peer, by token. A region is reused only after its token, or every token, was taken back."""

    def __init__(self, memory: SharedMemory, on_device: SharedMemory | None = None) -> None:
        """`memory`: host memory that is lent. `on_device`: device memory; None: the peer reads none."""
        self.memory, self._on_device = memory, on_device
        self.find = memory.find if on_device is None else self._find
        """A function that returns the place of a tensor in the memory that can be lent, or None. No tensor is empty."""
        self._passed: set[int] = set()  # numbers of segments whose descriptors the peer has
        self._lent: dict[int, Region] = {}
        self._next_token = 1

    def _find(self, tensor: torch.Tensor) -> TensorPlace | None:
        assert self._on_device is not None
        return (self.memory if tensor.device.type == "cpu" else self._on_device).find(tensor)

    @property
    def lent(self) -> int:
        """Number of references that the peer holds."""
        return len(self._lent)

    def pass_segment(self, number: int) -> bool:
        """Note that the peer gets this segment; False if it has it already."""
        if number in self._passed:
            return False
        self._passed.add(number)
        return True

    def withdraw_segment(self, number: int) -> bool:
        """Note that this segment exists no more; False if the peer never had it."""
        if number not in self._passed:
            return False
        self._passed.discard(number)
        return True

    def lend(self, tensor: torch.Tensor, place: TensorPlace) -> Reference:
        """Lend the region of a tensor; returns the reference to send."""
        token, self._next_token = self._next_token, self._next_token + 1
        memory = self.memory if self._on_device is None else self._memory_of(place.region)
        memory.hold(place.region)
        self._lent[token] = place.region
        return Reference(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            segment=place.region.segment.number,
            offset_bytes=place.offset_bytes,
            token=token,
        )

    def take_back(self, token: int) -> None:
        """Take a reference back. Raises ProtocolError if the token is not lent."""
        region = self._lent.pop(token, None)
        if region is None:
            raise ProtocolError(f"reference {token} was given back, but is not lent")
        memory = self.memory if self._on_device is None else self._memory_of(region)
        memory.release(region)

    def take_all_back(self) -> None:
        """Take all references back, because the peer has ended or is in no view of ours."""
        while self._lent:
            region = self._lent.popitem()[1]
            self._memory_of(region).release(region)

    def _memory_of(self, region: Region) -> SharedMemory:
        on_device = self._on_device if is_on_device(region.segment.number) else None
        return on_device or self.memory


class _Control(enum.IntEnum):
    """Frames between links themselves."""

    BEACON = FIRST_CONTROL_KIND  # with the sender's beacon
    SEGMENT = FIRST_CONTROL_KIND + 1  # with a segment; body: number, size
    SEGMENT_GONE = FIRST_CONTROL_KIND + 2  # body: number
    RETURNED = FIRST_CONTROL_KIND + 3  # body: tokens of references that the sender of this does not hold any more
    FAREWELL = FIRST_CONTROL_KIND + 4  # body: the generation that leaves the receiver out; 0: the sender ends
    LOSS = FIRST_CONTROL_KIND + 5  # a third member was lost; body: the cause (its place in `LossCause`), its id
    NEWER = FIRST_CONTROL_KIND + 6  # body: a generation that a member is in


_SEGMENT_BODY = struct.Struct("<IQ")
_NUMBER = struct.Struct("<Q")
_CAUSES = tuple(LossCause)


@dataclass(kw_only=True)
class Opening:
    """Progress in opening a link."""

    begun: bool = False  # this member wants it, or the peer has come
    used: bool = False  # a message was sent over it
    patient: bool = False  # the caller has a deadline, so the link needs none of its own
    deadline_s: float = math.inf
    request: Connection | None = None  # by which one end asks the other to dial; open until it has dialled
    requests: int = 0  # that ended without it


@dataclass(kw_only=True)
class Heard:
    """News that a peer has sent, about views and about other members."""

    newest: int = 0  # generation of a frame that came: nothing of older ones follows
    newer: int = 0  # a generation that it has heard of
    left_out: int | None = None  # the generation in which it goes on without us; 0: it leaves
    losses: list[tuple[str, LossCause]] = field(default_factory=list)


class Link:
    """The link to one peer. `same_host`: both ends read each other's shared memory. `lost`: the loss, or None."""

    def __init__(
        self,
        peer: Peer,
        *,
        same_host: bool,
        memory: SharedMemory,
        pin: Pin | None = None,
        share: DeviceShare | None = None,
    ) -> None:
        self.peer = peer
        self.same_host = same_host
        self.opening = Opening()
        self.heard = Heard()
        self.reported: LossCause | None = None  # how others have lost this peer
        self.lost: PeerLost | None = None
        self.stream: Stream | None = None
        self.outbox = Outbox()
        self.held: list[Frame] = []  # of generations that are not ours yet
        if not same_host or share is None or device_domain(peer.address) != share.domain:
            share = None
        self.lending = Lending(memory, None if share is None else share.memory)
        self.imports = Imports(pin, share)
        self._watcher: Watcher | None = None

    @property
    def reads_device(self) -> bool:
        """True if both ends read each other's device memory."""
        return self.imports.share is not None

    def push(self, kind: int, generation: int, body: bytes = b"", tensors: Sequence[torch.Tensor] = ()) -> None:
        """Queue a frame. Raises ValueError for a tensor that cannot travel."""
        plain = [self._sendable(tensor) for tensor in tensors]
        self.push_returned(generation)
        described: list[Inline | Reference] = []
        trailing: list[tuple[torch.Tensor, Region | None]] = []
        for tensor in plain:
            place = self.lending.find(tensor) if tensor.numel() else None
            if place is None or not self.same_host:
                described.append(Inline(dtype=tensor.dtype, shape=tuple(tensor.shape)))
                trailing.append((tensor, place.region if place else None))
            else:
                self.announce(place.region.segment, generation)
                described.append(self.lending.lend(tensor, place))
        self.outbox.push(encode(kind=kind, generation=generation, body=body, tensors=described))
        for tensor, region in trailing:
            if tensor.numel():
                self._push_elements(tensor, region)

    def _sendable(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is torch.strided and dtype_supported(tensor.dtype):
            if tensor.device.type == "cpu":
                return tensor.detach().contiguous()
            if self.reads_device and tensor.is_contiguous() and self.lending.find(tensor) is not None:
                return tensor.detach()
        raise ValueError(
            "only dense CPU tensors of a standard dtype travel, and a device's if they lie in memory that the receiver "
            f"reads; got {tensor.dtype} on {tensor.device}, {tensor.layout}"
        )

    def _push_elements(self, tensor: torch.Tensor, region: Region | None) -> None:
        if region is None:
            self.outbox.push(tensor_bytes(tensor))  # the view keeps the tensor's memory alive
            return
        held, memory = region, self.lending.memory
        memory.hold(held)
        self.outbox.push(tensor_bytes(tensor), done=lambda: memory.release(held))

    def announce(self, segment: Segment, generation: int) -> None:
        """Send a segment of this process to the peer, once."""
        if self.lending.pass_segment(segment.number):
            body = _SEGMENT_BODY.pack(segment.number, segment.mapping.size_bytes)
            self._push_control(_Control.SEGMENT, generation, body, fd=segment.fd)

    def push_beacon(self, fd: int, generation: int) -> None:
        """Queue this process's beacon."""
        self._push_control(_Control.BEACON, generation, b"", fd=fd)

    def push_gone(self, number: int, generation: int) -> None:
        """Queue the notice that a segment is gone, if the peer has it."""
        if self.lending.withdraw_segment(number):
            self._push_control(_Control.SEGMENT_GONE, generation, _NUMBER.pack(number))

    def push_farewell(self, generation: int) -> None:
        """Queue the last frame of the link."""
        self.outbox.push(farewell(generation))

    def push_loss(self, member: str, cause: LossCause, generation: int) -> None:
        """Queue the loss of another member."""
        self._push_control(_Control.LOSS, generation, bytes([_CAUSES.index(cause)]) + member.encode())

    def push_newer(self, newer: int, generation: int) -> None:
        """Queue the notice of a newer generation."""
        self._push_control(_Control.NEWER, generation, _NUMBER.pack(newer))

    def push_returned(self, generation: int) -> bool:
        """Queue the references that are to be given back; True if there were any."""
        tokens = self.imports.take_returned()
        if not tokens:
            return False
        self._push_control(_Control.RETURNED, generation, struct.pack(f"<{len(tokens)}Q", *tokens))
        return True

    def _push_control(self, kind: int, generation: int, body: bytes, *, fd: int | None = None) -> None:
        self.outbox.push(encode(kind=kind, generation=generation, body=body, tensors=()), fd=fd)

    def take(self, raw: RawFrame, on_death: Callable[[float], None]) -> Frame | None:
        """Serve a control frame, or make a message of it. Raises ProtocolError."""
        self.heard.newest = max(self.heard.newest, raw.generation)
        if raw.kind >= FIRST_CONTROL_KIND:
            self._serve(raw, on_death)
            return None
        tensors = tuple(self.imports.tensor(t) if isinstance(t, Reference) else t for t in raw.tensors)
        return Frame(source=self.peer.id, generation=raw.generation, kind=raw.kind, body=raw.body, tensors=tensors)

    def _serve(self, raw: RawFrame, on_death: Callable[[float], None]) -> None:
        try:
            match raw.kind:
                case _Control.BEACON:
                    self._watch(on_death)
                case _Control.SEGMENT:
                    self._import(*_SEGMENT_BODY.unpack(raw.body))
                case _Control.SEGMENT_GONE:
                    self.imports.drop(*_NUMBER.unpack(raw.body))
                case _Control.RETURNED:
                    for (token,) in _NUMBER.iter_unpack(raw.body):
                        self.lending.take_back(token)
                case _Control.FAREWELL:
                    (self.heard.left_out,) = _NUMBER.unpack(raw.body)
                case _Control.LOSS:
                    self._hear_loss(raw.body)
                case _Control.NEWER:
                    (self.heard.newer,) = _NUMBER.unpack(raw.body)
                case _:
                    raise ProtocolError(f"a control frame of unknown kind {raw.kind:#x}")
        except struct.error:
            raise ProtocolError(f"a control frame of kind {raw.kind:#x} with {len(raw.body)} bytes") from None

    def _hear_loss(self, body: bytes) -> None:
        if not body or body[0] >= len(_CAUSES):
            raise ProtocolError(f"a loss with {len(body)} bytes")
        self.heard.losses.append((body[1:].decode(errors="replace"), _CAUSES[body[0]]))

    def _watch(self, on_death: Callable[[float], None]) -> None:
        assert self.stream is not None
        if self._watcher is not None:
            raise ProtocolError("a second beacon")
        fd = self.stream.take_fd()
        try:
            self._watcher = watch_beacon(fd, on_death)
        finally:
            os.close(fd)

    def _import(self, number: int, size_bytes: int) -> None:
        assert self.stream is not None
        fd = self.stream.take_fd()
        try:
            self.imports.add(number, fd, size_bytes)
        finally:
            os.close(fd)

    @property
    def proven_dead(self) -> bool:
        """True if the peer's process has ended.

        The kernel marks the beacon of a dead process before it closes its sockets, so the mark is visible once a socket
        ends.
        """
        return self._watcher is not None and self._watcher.owner_ended

    def has_gone_on(self, generation: int) -> bool:
        """Return True if the peer's beacon shows a newer view. False for peers on other hosts."""
        return self._watcher is not None and self._watcher.generation > generation

    def hang_up(self) -> None:
        """Close the stream and forget what waits to be sent. What the peer may still be reading stays lent."""
        if self._watcher is not None:
            self._watcher.cancel()  # its page stays: whether the peer went on without us can still be read
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        self.outbox.clear()
        self.imports = Imports(self.imports.pin, self.imports.share)


def farewell(generation: int) -> bytes:
    """Return the last frame of a link: `generation` goes on without the receiver; 0 if the sender ends."""
    return encode(kind=_Control.FAREWELL, generation=generation, body=_NUMBER.pack(generation), tensors=())
