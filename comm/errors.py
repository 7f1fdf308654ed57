"""The errors of the communicator, named by what the caller can do next.

CommError
├── MemberLost         one member is gone: edit the view and go on
├── Aborted            somebody ended what was under way: give the attempt up
├── Timeout            a deadline passed without a proven loss: ask who is missing
├── HandshakeRefused   the two ends do not belong together: compare secret, job and names
├── OutOfMemory        no shared memory or descriptor is left: free tensors, or raise the limit that it names
└── ProtocolError      the other end sent what no correct one sends: the link is closed

Nothing here knows of sockets or tensors.
"""

from __future__ import annotations


class CommError(Exception):
    """Root of everything that the communicator raises on purpose."""


class MemberLost(CommError):  # noqa: N818 - the project's word, DESIGN and documentation use it as it stands
    """`member` cannot be reached any more; `reason` says how that became known."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(f"member {member!r} is lost: {reason}")
        self.member = member
        self.reason = reason


class Aborted(CommError):  # noqa: N818 - as above
    """The operation was ended by a call of `abort`, here or at another member."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"aborted: {reason}")
        self.reason = reason


class Timeout(CommError):  # noqa: N818 - as above
    """A deadline passed. The message says what was waited for; `missing`: members not heard of, where that is known."""

    def __init__(self, words: str, *, missing: tuple[str, ...] = ()) -> None:
        super().__init__(words)
        self.missing = missing


class HandshakeRefused(CommError):  # noqa: N818 - as above
    """The other end could not prove that it belongs to the same job, or refused us; `reason` is one sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"handshake refused: {reason}")
        self.reason = reason


class OutOfMemory(CommError):  # noqa: N818 - as above
    """The system gives no more shared memory, address space or descriptors; the message says which, and for what."""


class ProtocolError(CommError):
    """Bytes arrived that no correct member sends (garbage, wrong lengths, sizes over the caps)."""
