"""A group's members in rank order, as the executors and the group's callers share it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from elastrain.comm.shm.group_trails import GroupTrail


class MemberList:
    """`members` in rank order; an edit of the view replaces it. `number`: the group's name in frames. `trail`: where
    its last operation is told.

    Members that use the same name and the same list belong together: nothing is said when a group is made.
    """

    def __init__(self, name: str, me: str, members: Sequence[str], trail: GroupTrail | None = None) -> None:
        """Raises ValueError for a list that names a member twice, or not me."""
        self.trail = trail or GroupTrail(name)
        self.name, self.me = name, me
        self.members = tuple(members)
        self.number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        if me not in self.members or len(set(self.members)) != len(self.members):
            raise ValueError(f"group {name!r} must list every member once, {me!r} included; got {self.members}")

    @property
    def rank(self) -> int:
        return self.members.index(self.me)

    @property
    def size(self) -> int:
        return len(self.members)
