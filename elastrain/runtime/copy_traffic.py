"""Copies to new holders on their way out of the engine and into it, held back as `copy_pace` says.

Used by the engine's thread. Only while this member's training loop computes is anything held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from elastrain import protocol as p
from elastrain.comm.wire.values import Frame
from elastrain.messages import KINDS, ShardCopy
from elastrain.runtime.copy_pace import Clock, CopyPace

Arrival = TypeVar("Arrival")


class Giver(Protocol):
    """The protocol core, as far as it gives copies."""

    @property
    def is_time(self) -> bool:
        """Whether copies wait for `CopiesAllowed`."""

    @property
    def sent_bytes(self) -> int:
        """Of parameters, sent as copies so far."""


class CopyTraffic:
    """`idle_cores()`: how many processors have had nothing to do lately. `is_computing()`: whether the loop does."""

    def __init__(
        self, giver: Giver, *, clock: Clock, idle_cores: Callable[[], float], is_computing: Callable[[], bool]
    ) -> None:
        self._pace = CopyPace(clock)
        self._giver = giver
        self._clock = clock
        self._idle_cores = idle_cores
        self._is_computing = is_computing
        self._held: deque[Frame] = deque()
        """Copies that have come and are not taken yet: their senders send no more than a few at a time."""

    def wait_s(self, at_most_s: float) -> float:
        """How long to wait for other things, if no longer than that anyhow, until a copy may go."""
        if self._held and not self._is_computing():
            return 0.0
        waits = self._held or self._giver.is_time
        return min(at_most_s, self._pace.wait_s()) if waits else at_most_s

    def computed(self, micro_batch_s: float | None) -> None:
        """So long took a micro-batch here; None where none was measured."""
        if micro_batch_s is not None:
            self._pace.computed(micro_batch_s)

    def in_turn(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival | Frame]:
        """Hand on what has come, copies when it is their turn. They depend on nothing that comes after them."""
        for arrival in arrivals:
            if isinstance(arrival, Frame) and arrival.kind == KINDS[ShardCopy]:
                self._held.append(arrival)
            else:
                yield arrival
        while self._held and (not self._is_computing() or self._may_go()):
            began_s = self._clock()
            yield self._held.popleft()
            self._pace.spent(self._clock() - began_s)

    def allowances(self) -> Iterator[p.CopiesAllowed]:
        """What may be sent in this turn, if anything. What it costs the caller is measured."""
        if self._giver.is_time and self._may_go():
            before_bytes, began_s = self._giver.sent_bytes, self._clock()
            yield p.CopiesAllowed(parameters_bytes=self._pace.allowed_bytes())
            self._pace.spent(self._clock() - began_s, self._giver.sent_bytes - before_bytes)

    def _may_go(self) -> bool:
        if self._pace.should_look():
            self._pace.look(self._idle_cores())
        return self._pace.allowed_bytes() > 0
