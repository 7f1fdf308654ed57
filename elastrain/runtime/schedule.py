"""What the loader processes are to load next, and what they have loaded. Values only: no processes, no tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

Plan = Callable[[int], Sequence[int]]
"""Step -> the micro-batches that this member is now expected to compute, in its order. Asked again and again."""
Request = tuple[int, int]
"""`(step, micro-batch)`."""
Loaded = TypeVar("Loaded")

_LOOKAHEAD_STEPS = 2
_UNDER_WAY_MOST = 64
"""Requests that wait in the kernel with their results: so few that sending either never waits for a reader."""


class Schedule(Generic[Loaded]):
    """Requests come back in any order. At most `ahead` are under way or loaded, beside what somebody waits for."""

    def __init__(self, step: int, plan: Plan, *, ahead: int) -> None:
        self._step, self._plan, self._limit = step, plan, ahead
        self._wanted: Request | None = None
        self._under_way: set[Request] = set()
        self._loaded: dict[Request, Loaded] = {}
        self._taken: set[Request] = set()

    def want(self, request: Request) -> bool:
        """Somebody waits for it. True: it has to be asked for, before all others; it counts as under way then.

        Loading ahead starts at its step; what belongs to earlier ones is let go.
        """
        self._wanted = request
        self._advance(request[0])
        if request in self._loaded or request in self._under_way:
            return False
        self._under_way.add(request)
        return True

    def ahead(self) -> Iterator[Request]:
        """What else to ask for now, in this order. It counts as under way once it was handed out."""
        for step in range(self._step, self._step + _LOOKAHEAD_STEPS):
            for micro_batch in self._plan(step):
                if len(self._under_way) >= _UNDER_WAY_MOST or len(self._under_way) + len(self._loaded) >= self._limit:
                    return
                request = (step, micro_batch)
                if not (request in self._taken or request in self._loaded or request in self._under_way):
                    self._under_way.add(request)
                    yield request

    def arrived(self, request: Request, loaded: Loaded) -> None:
        """It came. What nobody will ask for any more is dropped."""
        self._under_way.discard(request)
        if request[0] >= self._step or request == self._wanted:
            self._loaded[request] = loaded

    def take(self, request: Request) -> Loaded | None:
        """What was loaded for it, handed out once; None if it has not come yet."""
        loaded = self._loaded.pop(request, None)
        if loaded is not None:
            self._taken.add(request)
        return loaded

    def _advance(self, step: int) -> None:
        if step > self._step:
            self._step = step
            self._loaded = {request: loaded for request, loaded in self._loaded.items() if request[0] >= step}
            self._taken = {request for request in self._taken if request[0] >= step}
