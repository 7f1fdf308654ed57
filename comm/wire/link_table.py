"""The links of a view by member, and what can be asked about all of them."""

from __future__ import annotations

from collections.abc import Iterator

from elastrain.comm.shm.imports import Imports
from elastrain.comm.wire.link import Link


class LinkTable:
    """`by_member`: one link for each other member of the view. `generation`: the view's; 0 before the first one."""

    def __init__(self, me: str, node: str) -> None:
        self.me, self.node = me, node
        self.generation = 0
        self.by_member: dict[str, Link] = {}

    def __iter__(self) -> Iterator[Link]:
        """All links as they are now: they may be lost or removed while a caller goes through them."""
        return iter(list(self.by_member.values()))

    def get(self, member: str) -> Link | None:
        return self.by_member.get(member)

    @property
    def members(self) -> tuple[str, ...]:
        """Everybody in the view, the lost ones too, sorted; me included."""
        return tuple(sorted([self.me, *self.by_member]))

    @property
    def standing(self) -> list[Link]:
        """Those that are opened and not lost: what is said to all goes over them."""
        return [link for link in self if link.opening.begun and link.lost is None]

    @property
    def complete(self) -> bool:
        """Whether streams stand to all members that are not lost."""
        return all(link.stream is not None or link.lost is not None for link in self)

    @property
    def unsent_bytes(self) -> int:
        """How many bytes wait to be sent to members that are not lost."""
        waiting = [link for link in self if link.lost is None and (link.opening.used or link.stream is not None)]
        return sum(link.outbox.size_bytes for link in waiting)

    def copy_unsent(self) -> None:
        """Copy what waits in streams: the tensors behind it may change from now on. For ends before their time."""
        for link in self:
            link.outbox.copy()

    def is_ahead(self, member: str) -> bool:
        """Whether this member is known to be in a newer generation: nothing of this one comes from it any more."""
        link = self.get(member)
        return link is not None and link.heard.newest > self.generation

    def may_be_torn(self) -> bool:
        """Whether what was read in other members' memory by now may have been changed meanwhile.

        Members use again what they lent to somebody whom a newer view leaves out, and whoever was stopped has not heard
        of that view. While all are in this view, everything that was copied before the call is whole.
        """
        return any(link.has_gone_on(self.generation) for link in self)

    def imports(self) -> dict[str, Imports]:
        """The memory that each other member on this host has passed, now and later. It outlives the link."""
        return {member: link.imports for member, link in self.by_member.items() if link.same_host}
