"""The access to the store of a job of one node: it is in memory, and answers at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elastrain.job.world import View
from elastrain.launcher.shared.job_values import NodeRecord, PutCheckpoint, Roster
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import Store


class LoneRegistry:
    """Nobody else reads it: what others would have to know is not put."""

    def __init__(self, store: Store, job: str) -> None:
        self._keys = JobKeys(store, job)

    def propose(self, view: View, then: Callable[[View | None], None]) -> None:
        then(self._keys.put_view(view))

    def remember(self, view: View) -> None: ...

    def put_spec(self, spec: Mapping[str, Any], then: Callable[[dict[str, Any]], None]) -> None:
        then(self._keys.put_spec(spec))

    def put_roster(self, roster: Roster, then: Callable[[Roster | None], None]) -> None:
        then(self._keys.put_roster(roster))

    def take_number(self, at_least: int, then: Callable[[int], None]) -> None:
        then(self._keys.take_number("members", at_least=at_least))

    def put_due(self) -> None: ...

    def put_begun(self) -> None: ...

    def put_record(self, record: NodeRecord, *, if_lost: bool = False) -> None: ...

    def put_checkpoint(self, command: PutCheckpoint, then: Callable[[str], None]) -> None:
        then(self._keys.put_checkpoint(command))

    def put_end(self, over: Over) -> None: ...

    def put_left(self, incarnation: int, *, is_done: bool) -> None: ...

    def next_deadline_s(self) -> float | None:
        return None

    def on_tick(self, now: float) -> None: ...

    def close(self) -> None: ...
