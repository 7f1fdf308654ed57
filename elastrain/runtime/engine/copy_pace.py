"""How fast copies to new holders go while the training loop computes: a token bucket of processor time.

Copies take the time of processors that have nothing to do; of those that compute, at most one part in fifty. Pure but
for the clock, which is a parameter. A shard is the smallest piece: one that costs more than there is makes a debt.

Copies to new holders on their way out of the engine and into it, held back as `copy_pace` says.

Used by the engine's thread. Only while this member's training loop computes is anything held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from elastrain import protocol as p
from elastrain.comm.wire.addresses import Frame
from elastrain.protocol.messages import KINDS, ShardCopy

Clock = Callable[[], float]

SHARE = 0.02
"""Of a micro-batch's time, copies may delay it by so much."""
LOOK_S = 0.2
"""The idle processors are looked at again after so long."""
IDLE_PROCESSORS = 0.25
"""With so many idle processors or more, copies may take more of them than before."""
FIRST_RATE = 200e6
"""Bytes of parameters per second, with their state: how fast copies are taken to go until one was measured."""
FIRST_MICRO_BATCH_S = 0.05
SENT_AGAIN = 2.0
"""What a giver pays for a copy, over the time of its digest: the socket or the ring takes the bytes afterwards."""


class CopyPace:
    """Says how many bytes of parameters may be copied now; fed with what copies and micro-batches have taken."""

    def __init__(self, clock: Clock) -> None:
        self.spare = 0.0
        """Seconds of idle processors per second that copies may take."""
        self._clock = clock
        self._filled_at_s = clock()
        self._looked_at_s = self._filled_at_s
        self._tokens_s = 0.0
        self._micro_batch_s = FIRST_MICRO_BATCH_S
        self._bytes_per_s = FIRST_RATE

    def computed(self, micro_batch_s: float) -> None:
        """So long takes a micro-batch here."""
        self._micro_batch_s = micro_batch_s

    def should_look(self) -> bool:
        return self._clock() - self._looked_at_s >= LOOK_S

    def look(self, idle_processors: float) -> None:
        """So many processors had nothing to do since the last look."""
        # Additive increase, multiplicative decrease: members of one machine share what is idle without a word.
        self._fill()
        was_long_ago = self._clock() - self._looked_at_s > 5 * LOOK_S
        self._looked_at_s = self._clock()
        if was_long_ago:  # nobody was copying: a part of what is idle, since others begin in the same moment
            self.spare = min(1.0, idle_processors / 4)
        elif idle_processors >= IDLE_PROCESSORS:
            self.spare = min(1.0, self.spare + idle_processors / 4)
        else:
            self.spare /= 2

    def spent(self, took_s: float, parameters_bytes: int = 0) -> None:
        """Copying has taken the engine so long; `parameters_bytes` were sent, 0 where one was taken."""
        self._fill()
        if parameters_bytes:
            took_s *= SENT_AGAIN
            rate = parameters_bytes / max(took_s, 1e-6)
            # Half of the last word and half of all before: the first copies of a view find cold memory.
            self._bytes_per_s = (self._bytes_per_s + rate) / 2
        self._tokens_s -= took_s

    def allowed_bytes(self) -> int:
        """How many bytes of parameters may be sent now; 0: none yet."""
        self._fill()
        return max(1, int(self._tokens_s * self._bytes_per_s)) if self._tokens_s > 0 else 0

    def wait_s(self) -> float:
        """How long until something may be copied."""
        self._fill()
        return max(0.0, -self._tokens_s) / self._income + 1e-3 if self._tokens_s <= 0 else 0.0

    @property
    def _income(self) -> float:
        return SHARE + self.spare

    def _fill(self) -> None:
        now_s = self._clock()
        # What one micro-batch grants is the most that is saved: longer silence must not end in a burst.
        most_s = self._income * self._micro_batch_s
        self._tokens_s = min(most_s, self._tokens_s + (now_s - self._filled_at_s) * self._income)
        self._filled_at_s = now_s


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
