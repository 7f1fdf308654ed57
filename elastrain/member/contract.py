"""Contract of a part of the member's machine. `elastrain/protocol/handlers.py` has the table of the handlers."""

from __future__ import annotations

from typing import Protocol

from elastrain.job.values import Recovery
from elastrain.protocol.handlers import Handling, handles, joined

__all__ = ["MemberPart", "handles", "joined"]


class MemberPart(Handling, Protocol):
    """Methods that the machine calls on each of its parts. A part overrides those that it needs.

    The handler of an event takes `event`. That of a message takes those of `source`, `message` and `payload` that it
    names.
    """

    def begin(self, step: int) -> None:
        """Forget all data of the step before: `step` is open now."""
        return

    def forget_view(self) -> None:
        """Forget questions, answers and transfers of the last view: some of its members may be gone."""
        return

    def resume(self, recovery: Recovery) -> None:
        """Go on in the new view, and send again what its members may lack."""
        return

    def progress(self) -> bool:
        """Do all work that has become possible. Returns True if any state of the machine was changed."""
        return False

    def why_not_yet(self) -> str:
        """Return what this part must still do before this member may vote on the open step, or ""."""
        return ""
