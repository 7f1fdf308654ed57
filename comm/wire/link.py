"""All that goes on with one member: what waits to be sent, its segments, its references to mine, its held frames.

A link exists from the edit that adds the member to the one that removes it. It is *opened* when somebody wants it; its
stream comes later (the member dials, or is being dialled) and may go earlier (it was lost). Nothing here knows of other
members.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence

import torch

from elastrain.comm.errors import ProtocolError
from elastrain.comm.shm.liveness import Watcher, watch_beacon
from elastrain.comm.shm.segments import Imports, Reference, Region, Segment, SharedMemory
from elastrain.comm.wire.frames import (
    FIRST_CONTROL_KIND,
    Inline,
    RawFrame,
    dtype_supported,
    encode,
    tensor_bytes,
)
from elastrain.comm.wire.stream import Outbox, Stream
from elastrain.comm.wire.values import Frame, LossCause, Peer

_BEACON = FIRST_CONTROL_KIND  # with the sender's beacon
_SEGMENT = FIRST_CONTROL_KIND + 1  # with a segment; body: number, size
_SEGMENT_GONE = FIRST_CONTROL_KIND + 2  # body: number
_RETURNED = FIRST_CONTROL_KIND + 3  # body: tokens of references that the sender of this does not hold any more
_FAREWELL = FIRST_CONTROL_KIND + 4  # body: the generation that leaves the receiver out; 0: the sender ends
_LOSS = FIRST_CONTROL_KIND + 5  # somebody else was lost; body: how (its place in `How`), its id
_NEWER = FIRST_CONTROL_KIND + 6  # body: a generation that somebody is in
_SEGMENT_BODY = struct.Struct("<IQ")
_NUMBER = struct.Struct("<Q")
_HOWS = tuple(LossCause)
_RETURN_AT_COUNT = 32
_RETURN_AFTER_S = 0.05  # references are given back in lumps: each frame wakes a process


class Link:
    """`lost`: None, or why nothing more comes. `left_out`: the generation of the peer that does without us, if told.

    `patient`: the link has no deadline, whoever needs it has one. `knock`: a connection by which one end asks the other
    to dial; open until it has.
    """

    def __init__(self, peer: Peer, *, same_node: bool, same_host: bool, shared: SharedMemory) -> None:
        self.peer = peer
        self.same_node = same_node
        self.same_host = same_host
        self.opened = self.used = self.patient = False
        self.deadline_s = math.inf
        self.knock: socket.socket | None = None
        self.knocks = 0
        self.rumour: LossCause | None = None  # how others have lost it
        self.told_losses: list[tuple[str, LossCause]] = []  # of others, by the peer
        self.told_newer = 0
        self.newest = 0  # generation of a frame that came: of older ones nothing follows
        self.lost: str | None = None
        self.lost_at_s = 0.0
        self.lost_cause = LossCause.BROKEN
        self.left_out: int | None = None
        self.stream: Stream | None = None
        self.outbox = Outbox()
        self.held: list[Frame] = []
        self._shared = shared
        self._announced: set[int] = set()
        self._lent: dict[int, Region] = {}
        self._next_token = 1
        self.imports = Imports()
        self._returned_s = time.monotonic()
        self._watcher: Watcher | None = None

    # Outgoing

    def push(self, kind: int, generation: int, body: bytes = b"", tensors: Sequence[torch.Tensor] = ()) -> None:
        """Queue a frame. Raises ValueError for a tensor that can not travel."""
        plain = [_sendable(tensor) for tensor in tensors]
        self.push_returned(generation)
        described: list[Inline | Reference] = []
        trailing: list[tuple[torch.Tensor, Region | None]] = []
        for tensor in plain:
            place = self._shared.find(tensor) if tensor.numel() else None
            if place is None or not self.same_host:
                described.append(Inline(dtype=tensor.dtype, shape=tuple(tensor.shape)))
                trailing.append((tensor, place.region if place else None))
            else:
                described.append(self._refer(tensor, place.region, place.offset_bytes, generation))
        self.outbox.push(encode(kind=kind, generation=generation, body=body, tensors=described))
        for tensor, region in trailing:
            if tensor.numel():
                self._push_elements(tensor, region)

    def _push_elements(self, tensor: torch.Tensor, region: Region | None) -> None:
        if region is None:
            self.outbox.push(tensor_bytes(tensor))  # the view keeps the tensor's memory alive
            return
        held = region
        self._shared.hold(held)
        self.outbox.push(tensor_bytes(tensor), done=lambda: self._shared.release(held))

    def announce(self, segment: Segment, generation: int) -> None:
        """Pass a segment of mine, once."""
        if segment.number not in self._announced:
            self._announced.add(segment.number)
            body = _SEGMENT_BODY.pack(segment.number, segment.mapping.size_bytes)
            self.outbox.push(encode(kind=_SEGMENT, generation=generation, body=body, tensors=()), fd=segment.fd)

    def _refer(self, tensor: torch.Tensor, region: Region, offset_bytes: int, generation: int) -> Reference:
        segment = region.segment
        self.announce(segment, generation)
        token, self._next_token = self._next_token, self._next_token + 1
        self._shared.hold(region)
        self._lent[token] = region
        return Reference(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            segment=segment.number,
            offset_bytes=offset_bytes,
            token=token,
        )

    def push_beacon(self, fd: int, generation: int) -> None:
        self.outbox.push(encode(kind=_BEACON, generation=generation, body=b"", tensors=()), fd=fd)

    def push_gone(self, number: int, generation: int) -> None:
        if number in self._announced:
            self._announced.discard(number)
            self._push_control(_SEGMENT_GONE, generation, _NUMBER.pack(number))

    def push_farewell(self, generation: int) -> None:
        self.outbox.push(farewell(generation))

    def push_loss(self, member: str, cause: LossCause, generation: int) -> None:
        self._push_control(_LOSS, generation, bytes([_HOWS.index(cause)]) + member.encode())

    def push_newer(self, newer: int, generation: int) -> None:
        self._push_control(_NEWER, generation, _NUMBER.pack(newer))

    def push_returned(self, generation: int) -> bool:
        """Queue what is to be given back; True if there was any."""
        tokens = self.imports.take_returned()
        if not tokens:
            return False
        self._returned_s = time.monotonic()
        self._push_control(_RETURNED, generation, struct.pack(f"<{len(tokens)}Q", *tokens))
        return True

    def return_due_s(self) -> float | None:
        """When `push_returned` should be called at the latest; None: nothing waits."""
        count = len(self.imports.returned)
        if not count:
            return None
        return 0.0 if count >= _RETURN_AT_COUNT else self._returned_s + _RETURN_AFTER_S

    def _push_control(self, kind: int, generation: int, body: bytes) -> None:
        self.outbox.push(encode(kind=kind, generation=generation, body=body, tensors=()))

    # Incoming

    def take(self, raw: RawFrame, on_death: Callable[[float], None]) -> Frame | None:
        """Serve a control frame, or make a message of it. Raises ProtocolError."""
        self.newest = max(self.newest, raw.generation)
        if raw.kind >= FIRST_CONTROL_KIND:
            self._serve(raw, on_death)
            return None
        tensors = tuple(self.imports.tensor(t) if isinstance(t, Reference) else t for t in raw.tensors)
        return Frame(source=self.peer.id, generation=raw.generation, kind=raw.kind, body=raw.body, tensors=tensors)

    def _serve(self, raw: RawFrame, on_death: Callable[[float], None]) -> None:
        try:
            if raw.kind == _BEACON:
                self._watch(on_death)
            elif raw.kind == _SEGMENT:
                number, size_bytes = _SEGMENT_BODY.unpack(raw.body)
                self._import(number, size_bytes)
            elif raw.kind == _SEGMENT_GONE:
                self.imports.drop(*_NUMBER.unpack(raw.body))
            elif raw.kind == _RETURNED:
                for (token,) in _NUMBER.iter_unpack(raw.body):
                    self._take_back(token)
            elif raw.kind == _FAREWELL:
                (self.left_out,) = _NUMBER.unpack(raw.body)
            elif raw.kind == _LOSS:
                self._hear_loss(raw.body)
            elif raw.kind == _NEWER:
                (self.told_newer,) = _NUMBER.unpack(raw.body)
            else:
                raise ProtocolError(f"a control frame of unknown kind {raw.kind:#x}")
        except struct.error:
            raise ProtocolError(f"a control frame of kind {raw.kind:#x} with {len(raw.body)} bytes") from None

    def _hear_loss(self, body: bytes) -> None:
        if not body or body[0] >= len(_HOWS):
            raise ProtocolError(f"a loss with {len(body)} bytes")
        self.told_losses.append((body[1:].decode(errors="replace"), _HOWS[body[0]]))

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

    def _take_back(self, token: int) -> None:
        region = self._lent.pop(token, None)
        if region is None:
            raise ProtocolError(f"reference {token} was given back, but is not lent")
        self._shared.release(region)

    # Ending

    @property
    def proven_dead(self) -> bool:
        """The kernel marks a dead process's beacon before it closes its sockets: who sees these sees the mark."""
        return self._watcher is not None and self._watcher.owner_ended

    def hang_up(self) -> None:
        """Close the stream and forget what waits to be sent. What the peer may still be reading stays lent."""
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None
        if self.stream is not None:
            self.stream.close()
            self.stream = None
        self.outbox.clear()
        self.imports = Imports()

    def take_all_back(self) -> None:
        """The member has ended, or is in no view of ours any more: what it held of my memory is free again."""
        while self._lent:
            self._shared.release(self._lent.popitem()[1])


def farewell(generation: int) -> bytes:
    """The frame that ends a link: `generation` goes on without the receiver; 0: the sender ends."""
    return encode(kind=_FAREWELL, generation=generation, body=_NUMBER.pack(generation), tensors=())


def _sendable(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not dtype_supported(tensor.dtype):
        raise ValueError(
            f"only dense CPU tensors of a standard dtype travel; got {tensor.dtype} on {tensor.device}, {tensor.layout}"
        )
    return tensor.detach().contiguous()
