"""A probe for a job whose nodes have no keys in the store: it dials their last known addresses.

Nodes that are cut off from the store train on, although their keys go with their leases. An answer counts only with the
job's secret and the name of the member or agent.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from elastrain.comm.errors import CommError
from elastrain.comm.wire.handshake import dial
from elastrain.comm.wire.ports import choose_address, connect
from elastrain.job.world import View
from elastrain.launcher.shared.job_values import Roster

_ANSWER_S = 2.0
"""Time limit of one probe. A host that is down does not answer at all."""
_AT_ONCE = 16


def who_answers(roster: Roster, view: View | None, *, secret: bytes, scope: str) -> str | None:
    """Return the name of a member of the view that answers, or None.

    Before the first view, agents of the roster are asked.
    """

    def answers(where: tuple[str, str]) -> bool:
        name, address = where
        try:
            sock, _ = connect(choose_address(address, same_node=False))
            with sock:  # the handshake blocks until the other end takes part
                dial(sock, secret=secret, job=scope, me="a node that starts", timeout_s=_ANSWER_S, expect=name)
        except (OSError, ValueError, CommError):
            return False
        return True

    agents = {node.signature: f"tcp:{node.endpoint}" for node in roster.nodes}
    asked = {member.id: member.address for member in view.members} if view is not None else agents
    with ThreadPoolExecutor(_AT_ONCE) as callers:
        found = zip(asked, callers.map(answers, asked.items()), strict=True)
        return next((name for name, is_there in found if is_there), None)
