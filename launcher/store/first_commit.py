"""What a job's keys say of its first commit: from when on it may have been made where nobody hears of it."""

from __future__ import annotations

from collections.abc import Container
from enum import IntEnum

from elastrain.job.world import View
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import StoreUnavailableError


class FirstCommit(IntEnum):
    """As far as the store has been told."""

    NONE = 0
    DUE = 1
    """It may have been made."""
    MADE = 2

    @property
    def key(self) -> str:
        """Its name in the store."""
        return {FirstCommit.DUE: "due", FirstCommit.MADE: "begun"}[self]


def first_commit_in(items: Container[str], keys: JobKeys) -> FirstCommit:
    there = [stage for stage in (FirstCommit.DUE, FirstCommit.MADE) if keys.prefix + stage.key in items]
    return max(there, default=FirstCommit.NONE)


def put_due(keys: JobKeys, view: View | None) -> None:
    """Say that it is due while `view` stands.

    Raises StoreUnavailableError where another one does: whoever asks may have been taken for dead, and the job begun
    anew, while there was nothing to lose.
    """
    while True:
        revision, stands = keys.newest_view()
        if view is None or stands != view:
            raise StoreUnavailableError("another view stands")
        if keys.commit({keys.view_key: revision}, {keys.prefix + FirstCommit.DUE.key: b"{}"}) is not None:
            return
