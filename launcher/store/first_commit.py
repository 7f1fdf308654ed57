"""The job's keys about its first commit. Once they exist, that commit may have been made on any node."""

from __future__ import annotations

from collections.abc import Container
from enum import IntEnum

from elastrain.job.world import View
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import StoreUnavailableError


class FirstCommit(IntEnum):
    """Progress of the first commit, as far as the store knows."""

    NONE = 0
    DUE = 1
    """The first commit may have been made."""
    MADE = 2

    @property
    def key(self) -> str:
        """The name of the key that records this stage."""
        return {FirstCommit.DUE: "due", FirstCommit.MADE: "begun"}[self]


def first_commit_in(items: Container[str], keys: JobKeys) -> FirstCommit:
    """Return the newest stage whose key is among these items."""
    there = [stage for stage in (FirstCommit.DUE, FirstCommit.MADE) if keys.prefix + stage.key in items]
    return max(there, default=FirstCommit.NONE)


def put_due(keys: JobKeys, view: View | None) -> None:
    """Record that the first commit is due, while `view` is the newest one.

    Raises StoreUnavailableError if another view is newer. The caller may then have been considered dead, and the job
    begun again, because there was no state to lose.
    """
    while True:
        revision, stands = keys.newest_view()
        if view is None or stands != view:
            raise StoreUnavailableError("another view stands")
        if keys.commit({keys.view_key: revision}, {keys.prefix + FirstCommit.DUE.key: b"{}"}) is not None:
            return
