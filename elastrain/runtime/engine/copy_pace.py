"""Rate limit of copies to new holders: `CopyPace` is a token bucket of processor time, `CopyTraffic` applies it.

Copies use idle processors, and at most 2 % of the time of those that compute. They are limited only while this member's
training loop computes. A shard, or in pipelines a piece of one, is the smallest unit: a copy that costs more than the
bucket holds makes a debt. A link gets the next copy only once nearly all of the last one has gone. Pure except for the
clock, which is a parameter. Used by the engine's thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from elastrain import protocol as p
from elastrain.comm.wire.addresses import Frame
from elastrain.protocol.messages import KINDS, ShardCopy
from elastrain.protocol.move_messages import ShadowPiece

Clock = Callable[[], float]

SHARE = 0.02
"""Share of a micro-batch's time by which copies may delay it."""
LOOK_S = 0.2
"""Seconds between two looks at the idle processors."""
IDLE_PROCESSORS = 0.25
"""Number of idle processors from which copies may use more of them than before."""
BUSY_LINK_S = 0.004
"""Seconds after which a busy link is looked at again while a copy waits for it."""
FIRST_RATE = 200e6
"""Assumed rate of copies until one was measured, in bytes of parameters (with their state) per second."""
FIRST_MICRO_BATCH_S = 0.05
SENT_AGAIN = 2.0
"""Cost of a sent copy in units of its measured time, because the socket or the ring takes the bytes afterwards."""


class CopyPace:
    """A token bucket that limits the bytes of parameters that may be copied, by the measured times of past copies."""

    def __init__(self, clock: Clock) -> None:
        self.spare = 0.0
        """Seconds of idle processors that copies may use per second."""
        self._clock = clock
        self._filled_at_s = clock()
        self._looked_at_s = self._filled_at_s
        self._tokens_s = 0.0
        self._micro_batch_s = FIRST_MICRO_BATCH_S
        self._bytes_per_s = FIRST_RATE

    def computed(self, micro_batch_s: float) -> None:
        """Note the time of a micro-batch. The bucket holds at most the tokens of one micro-batch."""
        self._micro_batch_s = micro_batch_s

    def should_look(self) -> bool:
        """Return True if it is time to look at the idle processors again."""
        return self._clock() - self._looked_at_s >= LOOK_S

    def look(self, idle_processors: float) -> None:
        """Adapt the share of idle processors. `idle_processors`: mean number of them since the last look."""
        # Additive increase, multiplicative decrease: so members of one machine share idle processors without messages.
        self._fill()
        was_long_ago = self._clock() - self._looked_at_s > 5 * LOOK_S
        self._looked_at_s = self._clock()
        if was_long_ago:  # no copy was under way: start with a part, because other members start at the same moment
            self.spare = min(1.0, idle_processors / 4)
        elif idle_processors >= IDLE_PROCESSORS:
            self.spare = min(1.0, self.spare + idle_processors / 4)
        else:
            self.spare /= 2

    def spent(self, took_s: float, parameters_bytes: int = 0) -> None:
        """Charge the time of a copy. `parameters_bytes`: bytes sent, or 0 for a copy that was received."""
        self._fill()
        if parameters_bytes:
            took_s *= SENT_AGAIN
            rate = parameters_bytes / max(took_s, 1e-6)
            # Mean of the last copy and all before: the first copies of a view are slower because memory is cold.
            self._bytes_per_s = (self._bytes_per_s + rate) / 2
        self._tokens_s -= took_s

    def allowed_bytes(self) -> int:
        """Return the bytes of parameters that may be sent now; 0 if none yet."""
        self._fill()
        return max(1, int(self._tokens_s * self._bytes_per_s)) if self._tokens_s > 0 else 0

    def wait_s(self) -> float:
        """Return the seconds until something may be copied."""
        self._fill()
        return max(0.0, -self._tokens_s) / self._income + 1e-3 if self._tokens_s <= 0 else 0.0

    @property
    def _income(self) -> float:
        return SHARE + self.spare

    def _fill(self) -> None:
        now_s = self._clock()
        # At most the tokens of one micro-batch are saved, so that a long pause does not end in a burst.
        most_s = self._income * self._micro_batch_s
        self._tokens_s = min(most_s, self._tokens_s + (now_s - self._filled_at_s) * self._income)
        self._filled_at_s = now_s


_HELD = frozenset({KINDS[ShardCopy], KINDS[ShadowPiece]})
Arrival = TypeVar("Arrival")


class Giver(Protocol):
    """The part of the protocol core that gives copies."""

    @property
    def takers(self) -> frozenset[str]:
        """Members to which copies wait for `CopiesAllowed`."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of parameters that were sent as copies so far."""


class CopyTraffic:
    """The copies to new holders that pass through the engine in both directions, held back as `CopyPace` says."""

    def __init__(
        self,
        giver: Giver,
        *,
        clock: Clock,
        idle_cores: Callable[[], float],
        is_computing: Callable[[], bool],
        busy: Callable[[], frozenset[str]] = frozenset,
    ) -> None:
        """Start without copies.

        idle_cores: returns the number of processors that were idle since its last call.
        is_computing: returns True while the training loop computes.
        busy: returns the members whose links still have much to send.
        """
        self._pace = CopyPace(clock)
        self._giver = giver
        self._clock = clock
        self._idle_cores = idle_cores
        self._is_computing = is_computing
        self._busy = busy
        self._held: deque[Frame] = deque()
        """Copies that have arrived and are not handled yet. They are few, because senders limit them."""

    def wait_s(self, at_most_s: float) -> float:
        """Return the seconds to wait for the network, at most `at_most_s`, and less if a copy may go earlier."""
        if self._held and not self._is_computing():
            return 0.0
        takers = self._giver.takers
        if self._held or (takers and takers - self._busy()):
            return min(at_most_s, self._pace.wait_s())
        return min(at_most_s, BUSY_LINK_S) if takers else at_most_s

    def computed(self, micro_batch_s: float | None) -> None:
        """Note the time of a micro-batch, or None if none was measured."""
        if micro_batch_s is not None:
            self._pace.computed(micro_batch_s)

    def in_turn(self, arrivals: Iterable[Arrival]) -> Iterator[Arrival | Frame]:
        """Yield arrivals, and hold copies back until it is their turn. No later arrival depends on a copy."""
        for arrival in arrivals:
            if isinstance(arrival, Frame) and arrival.kind in _HELD:
                self._held.append(arrival)
            else:
                yield arrival
        while self._held and (not self._is_computing() or self._may_go()):
            began_s = self._clock()
            yield self._held.popleft()
            self._pace.spent(self._clock() - began_s)

    def allowances(self) -> Iterator[p.CopiesAllowed]:
        """Yield the allowance to send copies in this turn, if any. The time that the caller takes is charged."""
        takers = self._giver.takers
        if takers and takers - (busy := self._busy()) and self._may_go():
            before_bytes, began_s = self._giver.sent_bytes, self._clock()
            yield p.CopiesAllowed(parameters_bytes=self._pace.allowed_bytes(), busy=busy)
            self._pace.spent(self._clock() - began_s, self._giver.sent_bytes - before_bytes)

    def _may_go(self) -> bool:
        if self._pace.should_look():
            self._pace.look(self._idle_cores())
        return self._pace.allowed_bytes() > 0
