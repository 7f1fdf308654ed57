"""The nouns of the physical world: members, views, phases. Plain values, shared by the runtime and the launcher.

Nothing that does I/O, reads a clock or imports torch may come in here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

# In the order of a step; `join` comes before the first one of a member, `shutdown` after its last. From `quiesce` to
# `complete` they are those of a recovery, and none of them is passed in the first view: nothing is recovered there.
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
    "shutdown",
)
"""The places of a step that faults, logs and `status` can name."""


FULL_QUOTA = 4
"""In quarters: what a member gets that is as fast as the others."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One training process. `id` is never used twice in a job: a restarted worker is a new member."""

    # Never used twice, so that words about a member that is gone cannot be taken for words about its successor.
    id: str
    node: str
    address: str = ""
    """Where its mesh listens, e.g. `unix:elastrain/job/m0` or `tcp:10.0.0.1:4711`."""
    incarnation: int = 0
    """Of its node: the start of the agent that started it."""
    # Part of the view, so that all members plan with the same ones: who computes what shows in no bit.
    quota: int = FULL_QUOTA
    """How much of a full share of the runs it gets, 1 to 4 quarters: a straggler gets less."""


@dataclass(frozen=True, kw_only=True)
class View:
    """`(generation, ordered members)`. A member's rank is its position."""

    # In order: ranks are positions, and wherever one of several equals is chosen, the first in the view is it.
    generation: int
    members: tuple[Member, ...]
    # Words and what is learned later are no part of a view's identity: two agents may tell them differently.
    reason: str = field(default="", compare=False)
    begun: bool = field(default=False, compare=False)
    """A step may have been committed: members that all come new to the job do not begin it, its state is gone."""
    links_since: int = field(default=0, compare=False)
    """The generation with which members last made the links between their nodes anew."""
    anew_since: int = field(default=0, compare=False)
    """The generation with which members last began their open step anew."""

    def __post_init__(self) -> None:
        if len(set(self.ids)) != len(self.members):
            raise ValueError(f"a view names each member once; got {self.ids}")

    @cached_property  # a simulated job asks for it ten times per event
    def ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @property
    def nodes(self) -> dict[str, str]:
        """Member id -> node name."""
        return {member.id: member.node for member in self.members}

    @property
    def quotas(self) -> dict[str, int]:
        """Member id -> its quota, of those that have not a full one."""
        return {member.id: member.quota for member in self.members if member.quota != FULL_QUOTA}

    def rank(self, member_id: str) -> int:
        """Find the member's position. Raises ValueError if it is not in the view."""
        return self.ids.index(member_id)

    def __contains__(self, member_id: str) -> bool:
        return member_id in self.ids
