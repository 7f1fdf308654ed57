"""Errors of the communicator, named by what the caller can do next.

    CommError
    ├── MemberLost         one member is gone: change the view and go on
    ├── Aborted            a member ended the operation: give the attempt up
    ├── Timeout            a deadline passed without a proven loss: see which members are missing
    ├── HandshakeRefused   the two ends do not belong together: compare secret, job and names
    ├── OutOfMemory        no shared memory or descriptor is left: free tensors, or raise the limit in the message
    └── ProtocolError      the other end sent bytes that no correct member sends: the link is closed

This module knows no sockets and no tensors.
"""

from __future__ import annotations


class CommError(Exception):
    """Root of all errors that the communicator raises on purpose."""


class MemberLost(CommError):  # noqa: N818 - the documentation uses the name without "Error"
    """Error for a member that cannot be reached any more. `reason` says how that became known."""

    def __init__(self, member: str, reason: str) -> None:
        super().__init__(f"member {member!r} is lost: {reason}")
        self.member = member
        self.reason = reason


class Aborted(CommError):  # noqa: N818 - as above
    """Error of an operation that was ended by a call of `abort`, on this member or on another one."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"aborted: {reason}")
        self.reason = reason


class Timeout(CommError):  # noqa: N818 - as above
    """Error of a deadline that passed; the message says what was awaited.

    `missing` names the members that did not answer, as far as that is known.
    """

    def __init__(self, words: str, *, missing: tuple[str, ...] = ()) -> None:
        super().__init__(words)
        self.missing = missing


class HandshakeRefused(CommError):  # noqa: N818 - as above
    """Refusal of a connection by either end: the other one did not prove that it belongs to the job.

    `reason` is one sentence.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"handshake refused: {reason}")
        self.reason = reason


class OutOfMemory(CommError):  # noqa: N818 - as above
    """Error for exhausted shared memory, address space or descriptors. The message says which, and for what."""


class ProtocolError(CommError):
    """Error for bytes that no correct member sends: garbage, wrong lengths, or sizes over the caps."""
