"""Tagged messages between two members of a group: copied when sent, matched in order with who awaits them."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastrain.comm.errors import CommError, Timeout
from elastrain.comm.kinds import Kind, only_tensor, unpack
from elastrain.comm.mailbox import Address, Mailbox
from elastrain.comm.mesh import Frame
from elastrain.comm.work import Received, Work

_BODY = struct.Struct("<Qq")  # group, tag


class Postman(Protocol):
    """What letters ask of their communicator; by its thread."""

    @property
    def error(self) -> CommError | None: ...

    def send(self, member: str, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None: ...


@dataclass(kw_only=True)
class Reader:
    """Somebody who waits for a tagged message."""

    work: Received
    out: torch.Tensor
    deadline_s: float
    words: str


class Letters:
    """Used by the communicator's thread."""

    def __init__(self, postman: Postman) -> None:
        self._postman = postman
        self._mailbox: Mailbox[torch.Tensor, Reader] = Mailbox()

    def post(self, work: Work, *, group: int, to: str, tag: int, tensor: torch.Tensor) -> None:
        """`tensor` must not change any more."""
        error = self._postman.error
        if error is None:
            self._postman.send(to, Kind.LETTER, _BODY.pack(group, tag), (tensor,))
        work.finish(error)

    def read(self, address: Address, reader: Reader) -> None:
        """Hand over what has come, or what will come."""
        if self._postman.error is not None:
            reader.work.finish(self._postman.error)
            return
        found = self._mailbox.take(address, reader)
        if found is not None:
            _hand_over(reader, found[0].source or "", found[1])

    def receive(self, frame: Frame) -> None:
        """Raises ProtocolError."""
        (group, tag), _ = unpack(_BODY, frame)
        tensor = only_tensor(frame)
        if self._postman.error is not None:
            return
        reader = self._mailbox.put(Address(group=group, source=frame.source, tag=tag), tensor)
        if reader is not None:
            _hand_over(reader, frame.source, tensor)

    def next_deadline_s(self) -> float | None:
        """In time.monotonic(); None: nobody waits."""
        return min((reader.deadline_s for _, reader in self._mailbox.readers), default=None)

    def overdue(self) -> Timeout | None:
        """What failed because nothing came in time."""
        now_s = time.monotonic()
        late = (Timeout(reader.words) for _, reader in self._mailbox.readers if reader.deadline_s <= now_s)
        return next(late, None)

    def end(self, error: CommError) -> None:
        for reader in self._mailbox.clear():
            reader.work.finish(error)


def _hand_over(reader: Reader, source: str, tensor: torch.Tensor) -> None:
    out = reader.out
    if (tensor.numel(), tensor.dtype) != (out.numel(), out.dtype):
        words = f"{tensor.dtype}[{tensor.numel()}] came from {source!r}, {out.dtype}[{out.numel()}] was awaited"
        reader.work.finish(ValueError(words))
        return
    out.copy_(tensor.view(out.shape))
    reader.work.source = source
    reader.work.finish()
