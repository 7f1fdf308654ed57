"""The store access of a job with one node. The store is in memory, and every answer comes at once."""

# ruff: noqa: PIE790 (methods that do nothing keep their `...` behind the docstring)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastrain.job.world import View
from elastrain.launcher.shared.job_values import NodeRecord, PutCheckpoint, Roster
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import Store


class LoneRegistry:
    """Store access for one node. Data that only other nodes would read are not put."""

    def __init__(self, store: Store, job: str) -> None:
        self._keys = JobKeys(store, job)

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        """Put the view, and pass on the one that the store holds."""
        then(self._keys.put_view(view))

    def remember(self, view: View) -> None:
        """Do nothing: this store loses no view."""
        ...

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        """Put the spec if there is none, and pass on the one that the store holds."""
        then(self._keys.put_spec(spec))

    def put_roster(self, roster: Roster, then: Callable[[Roster | None], None]) -> None:
        """Put the roster if there is none, and pass on the one that the store holds."""
        then(self._keys.put_roster(roster))

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        """Take the number of a new member, and pass it on."""
        then(self._keys.take_number("members", at_least=at_least))

    def put_due(self) -> None:
        """Do nothing: no other node waits for the first commit."""
        ...

    def put_begun(self) -> None:
        """Do nothing: no other node asks for this."""
        ...

    def put_record(self, record: NodeRecord, *, if_lost: bool = False) -> None:
        """Do nothing: no other node reads the record."""
        ...

    def put_checkpoint(self, command: PutCheckpoint, then: Callable[[str], None]) -> None:
        """Record a checkpoint as the newest one, and pass on the reason if that is refused."""
        then(self._keys.put_checkpoint(command))

    def put_end(self, over: Over) -> None:
        """Do nothing: no other node reads how the job ended."""
        ...

    def put_left(self, incarnation: int, *, is_done: bool) -> None:
        """Do nothing: no other node needs to know."""
        ...

    def next_deadline_s(self) -> float | None:
        """Return None, because nothing is ever repeated."""
        return None

    def on_tick(self, now: float) -> None:
        """Do nothing: no call is ever repeated."""
        ...

    def close(self) -> None:
        """Do nothing: the caller owns the store."""
        ...
