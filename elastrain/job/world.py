"""The physical world: members, views, phases. Plain values, shared by the runtime and the launcher.

No I/O, no clock, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

# In the order of a step. `join` comes before a member's first step, `shutdown` after its last. `quiesce` to `complete`
# belong to a recovery. No member passes them in the first view, because nothing is recovered there. `move-record` to
# `move-over` belong to moves of blocks in pipelines: named, received, ready, and over.
PHASES = (
    "join",
    "forward",
    "backward",
    "reduce",
    "commit",
    "apply",
    "publish",
    "quiesce",
    "report",
    "decide",
    "complete",
    "copy",
    "move-record",
    "move-publish",
    "move-ready",
    "move-over",
    "shutdown",
)
"""The places of a step that faults, logs and `status` can name."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One training process. `id` is never used twice in a job: a restarted worker is a new member."""

    # Never used twice, so that messages about a lost member cannot be taken for messages about its successor.
    id: str
    node: str
    address: str = ""
    """Address at which its mesh listens, e.g. `unix:elastrain/job/m0` or `tcp:10.0.0.1:4711`."""
    incarnation: int = 0
    """Incarnation of its node: the start of the agent that started this member."""


@dataclass(frozen=True, kw_only=True)
class View:
    """A generation and its ordered members. A member's rank is its position."""

    # Ordered: ranks are positions, and wherever one of several equal members is chosen, the first of the view is taken.
    generation: int
    members: tuple[Member, ...]
    # Texts and facts learned later do not belong to a view's identity: two agents may state them differently.
    reason: str = field(default="", compare=False)
    begun: bool = field(default=False, compare=False)
    """True if a step may have been committed.

    Then a view of newcomers alone must not begin, because the state is lost.
    """
    links_since: int = field(default=0, compare=False)
    """Generation in which members last renewed the links between their nodes."""
    anew_since: int = field(default=0, compare=False)
    """Generation in which members last restarted their open step."""

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.members):
            raise ValueError(f"a view names each member once; got {self.ids}")

    @cached_property  # a simulated job asks for it ten times per event
    def ids(self) -> tuple[str, ...]:
        """Member ids, in rank order."""
        return tuple(member.id for member in self.members)

    @cached_property
    def by_id(self) -> dict[str, Member]:
        """Members by their ids."""
        return {member.id: member for member in self.members}

    @property
    def nodes(self) -> dict[str, str]:
        """Member id -> node name."""
        return {member.id: member.node for member in self.members}

    def rank(self, member_id: str) -> int:
        """Return the member's position. Raises ValueError if it is not in the view."""
        return self.ids.index(member_id)

    def __contains__(self, member_id: str) -> bool:
        return member_id in self.by_id
