"""Tagged messages between two members of a group: copied when sent, matched in order with who awaits them.

On one host the copy is read in place: who has read it looks at the sender's fence afterwards (see `lines`), since the
memory of a letter to somebody who was removed from the view is used again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastrain.comm.errors import Aborted, CommError, MemberLost, Timeout
from elastrain.comm.groups.kinds import Kind, only_tensor, unpack
from elastrain.comm.groups.lines import Lines, why_gone
from elastrain.comm.groups.mailbox import Address, Mailbox
from elastrain.comm.groups.work import Received, Work
from elastrain.comm.wire.values import Frame, LossCause

_BODY = struct.Struct("<Qqq")  # group, tag, the sender's fence


class Postman(Protocol):
    """What letters ask of their communicator; by its thread."""

    lost: dict[str, LossCause]

    @property
    def error(self) -> CommError | None: ...

    def send(self, member: str, kind: int, body: bytes, tensors: Sequence[torch.Tensor] = ()) -> None: ...

    def break_off(self, error: MemberLost | Aborted | Timeout) -> None: ...


@dataclass(kw_only=True)
class Reader:
    """Somebody who waits for a tagged message."""

    work: Received
    out: torch.Tensor
    deadline_s: float
    words: str


@dataclass(frozen=True, kw_only=True)
class _Letter:
    source: str
    fence: int
    tensor: torch.Tensor


class Letters:
    """Used by the communicator's thread. `me`: whose own letters need no fence."""

    def __init__(self, postman: Postman, lines: Lines, me: str) -> None:
        self._postman, self._lines, self._me = postman, lines, me
        self._mailbox: Mailbox[_Letter, Reader] = Mailbox()

    def post(self, work: Work, *, group: int, to: str, tag: int, tensor: torch.Tensor) -> None:
        """`tensor` must not change any more."""
        error = self._postman.error
        if error is None:
            self._lines.show_fence(to)
            self._postman.send(to, Kind.LETTER, _BODY.pack(group, tag, self._lines.fence), (tensor,))
        work.finish(error)

    def read(self, address: Address, reader: Reader) -> None:
        """Hand over what has come, or what will come."""
        if self._postman.error is not None:
            reader.work.finish(self._postman.error)
            return
        found = self._mailbox.take(address, reader)
        if found is not None:
            self._hand_over(reader, found[1])

    def receive(self, frame: Frame) -> None:
        """Raises ProtocolError."""
        (group, tag, fence), _ = unpack(_BODY, frame)
        letter = _Letter(source=frame.source, fence=fence, tensor=only_tensor(frame))
        if self._postman.error is not None:
            return
        reader = self._mailbox.put(Address(group=group, source=frame.source, tag=tag), letter)
        if reader is not None:
            self._hand_over(reader, letter)

    def _hand_over(self, reader: Reader, letter: _Letter) -> None:
        out, tensor = reader.out, letter.tensor
        if (tensor.numel(), tensor.dtype) != (out.numel(), out.dtype):
            came = f"{tensor.dtype}[{tensor.numel()}] came from {letter.source!r}"
            reader.work.finish(ValueError(f"{came}, {out.dtype}[{out.numel()}] was awaited"))
            return
        out.copy_(tensor.view(out.shape))
        if letter.source != self._me and self._lines.gave_up(letter.source, letter.fence):
            error = Aborted(f"{letter.source!r} went on to a newer view while its message was read")
            reader.work.finish(error)
            self._postman.break_off(error)
            return
        reader.work.source = letter.source
        reader.work.finish()

    def next_deadline_s(self) -> float | None:
        """In time.monotonic(); None: nobody waits."""
        return min([reader.deadline_s for _, reader in self._mailbox.readers], default=None)

    def overdue(self) -> Timeout | MemberLost | None:
        """What failed because nothing came in time, or will ever come."""
        now_s = time.monotonic()
        for address, reader in self._mailbox.readers:
            gone = why_gone(self._postman.lost, address.source)
            if gone is not None:
                return gone
            if reader.deadline_s <= now_s:
                return Timeout(reader.words)
        return None

    def end(self, error: CommError) -> None:
        for reader in self._mailbox.clear():
            reader.work.finish(error)
