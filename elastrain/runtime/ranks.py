"""The place of this process in its job: rank, world size, member id. They are known from `init` on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from elastrain.job.world import View


class Ranked(ABC):
    """The part of a job's interface that tells members apart. Before the first view, the launcher's word counts."""

    @property
    @abstractmethod
    def member(self) -> str:
        """Id of this member, such as "m0". A worker that replaces another one has an id of its own."""

    @property
    def rank(self) -> int:
        """Position of this member in the current view. Before its first view, the position that the launcher expects.

        A member that joins a running job is never 0 before it has joined.
        """
        view = self._own_view()
        return view.rank(self.member) if view else self._expected_place()[0]

    @property
    def world_size(self) -> int:
        """Number of members in the current view. Before the first view, the number that the launcher expects."""
        view = self._own_view()
        return len(view.members) if view else self._expected_place()[1]

    @property
    def is_main(self) -> bool:
        """True on rank 0. Another member becomes the main one if that is lost: ask again in each step."""
        return self.rank == 0

    @abstractmethod
    def _own_view(self) -> View | None:
        """Return the current view if this member belongs to it, else None."""

    @abstractmethod
    def _expected_place(self) -> tuple[int, int]:
        """Return rank and world size that the launcher expects in the first view."""
