"""The network between nodes: streams that are in order, late, held while there is no way, and cut off in the middle.

Production's transports are ordered streams of authenticated frames: a lost packet comes again, a doubled one is thrown
away. So a network that drops and doubles shows at the cores as delay, as the loss of a link with all that was on its
way, and, between agents, as notices that come again when a link is there again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from tests.sim.job.clock import Clock, Process

STORE = "etcd"
"""A node like the others, as far as ways to it go."""
HeldOff = Callable[[str, str], None]


class Network:
    """Which node's packets reach which. Owns the cuts and the slow ways."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._cuts: Counter[tuple[str, str]] = Counter()
        self._slow: dict[tuple[str, str], float] = {}
        self._streams: dict[tuple[str, str], list[Stream]] = {}
        self.on_cut: list[HeldOff] = []
        self.on_heal: list[HeldOff] = []

    def is_cut(self, source: str, to: str) -> bool:
        return self._cuts[source, to] > 0

    def reach_each_other(self, one: str, other: str) -> bool:
        return not self._cuts[one, other] and not self._cuts[other, one]

    def delay_s(self, source: str, to: str) -> float:
        usual = self.clock.soon()
        return usual if source == to else usual * self._slow.get((source, to), 1.0)

    def slow(self, source: str, to: str, factor: float, for_s: float) -> None:
        self._slow[source, to] = factor
        self.clock.at(for_s, lambda: self._slow.pop((source, to), None) and None)

    def cut(self, source: str, to: str, for_s: float) -> None:
        """No packet gets from one to the other."""
        self._cuts[source, to] += 1
        for act in self.on_cut:
            act(source, to)
        self.clock.at(for_s, lambda: self._heal(source, to))

    def _heal(self, source: str, to: str) -> None:
        self._cuts[source, to] -= 1
        if self._cuts[source, to]:
            return
        for stream in self._streams.get((source, to), []):
            stream.go_on()
        for act in self.on_heal:
            act(source, to)

    def add(self, stream: Stream) -> None:
        self._streams.setdefault((stream.source, stream.to.node), []).append(stream)


class Stream:
    """What one process says to another, in order. `can_be_cut`: over the network, and not inside a machine."""

    def __init__(
        self, network: Network, source: str, to: Process, receive: Callable[[Any], None], *, can_be_cut: bool = True
    ) -> None:
        self.network, self.source, self.to = network, source, to
        self._receive = receive
        self._can_be_cut = can_be_cut and source != to.node
        self._pending: deque[Any] = deque()
        self._last_s = 0.0
        if self._can_be_cut:
            network.add(self)

    def send(self, item: Any) -> None:
        self._pending.append(item)
        self._schedule()

    def _schedule(self) -> None:
        now = self.network.clock.now
        at_s = max(now + self.network.delay_s(self.source, self.to.node), self._last_s + 1e-6)
        self._last_s = at_s
        self.to.later(at_s - now, self._deliver)

    def _deliver(self) -> None:
        if self._pending and not (self._can_be_cut and self.network.is_cut(self.source, self.to.node)):
            self._receive(self._pending.popleft())

    def go_on(self) -> None:
        """There is a way again: what was held comes."""
        for _ in self._pending:
            self._schedule()

    def drain(self) -> None:
        """Whoever listens takes in at once what was said until now."""
        while self._pending:
            self._receive(self._pending.popleft())

    def break_off(self, *, last: Any = None) -> None:
        """Its sender is gone: of what is on its way a first part still arrives, then `last`."""
        kept = self.network.clock.rng.randint(0, len(self._pending))
        self._pending = deque(list(self._pending)[:kept])
        if last is not None:
            self.send(last)

    def drop(self) -> None:
        self._pending.clear()
