"""etcd as the agents meet it: `MemoryStore` in virtual time, behind clients that are late, cut off, and left in doubt.

The anomalies are those of the real one: news come late, and again after a watch has broken; leases have their full time
again after a restart; histories are compacted; a transaction's outcome may be unknown; the data may be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastrain.launcher.store.port import Broken, Change, Item, Listing, MemoryStore, StoreUnavailableError
from tests.sim.job.clock import Clock, Process
from tests.sim.job.network import STORE, Network

_LIMIT_S = 4.0


class Etcd:
    """The one store of a job. `on_write` hears of each transaction that has changed something."""

    def __init__(self, clock: Clock, network: Network, *, revision: int = 1) -> None:
        self.clock, self.network = clock, network
        self.memory = MemoryStore(clock.monotonic)
        self.memory._revision = self.memory._compacted = revision
        self.is_away = False
        self.wiped_s: float | None = None
        """When it has lost its data."""
        self.is_torn = False
        """Its leader changes: transactions that are carried out may not be answered."""
        self.clients: list[Client] = []
        self.on_write: Callable[[Mapping[str, bytes]], None] = lambda put: None
        self._commits = 0

    def go_away(self, for_s: float, *, restarts: bool, wiped: bool = False) -> None:
        self.is_away = True
        self.wiped_s = self.clock.now if wiped else self.wiped_s
        if wiped:
            # Revisions begin anew, leases do not: etcd makes their numbers of the time. Else a lease from before it
            # could be that of another key now, and what lies under it would outlive its owner by hours.
            used, self.memory = self.memory._next_lease, MemoryStore(self.clock.monotonic)
            self.memory._next_lease = used
        self._break_watches("the connection is lost")
        self.clock.at(for_s, lambda: self._come_back(restarts=restarts, went_s=for_s))

    def _come_back(self, *, restarts: bool, went_s: float) -> None:
        # Leases do not expire while there is no leader; a new one gives each its whole time again.
        for lease in self.memory._leases.values():
            lease.ends_s = self.clock.now + lease.ttl_s if restarts else lease.ends_s + went_s
        self.is_away = False

    def tear(self, for_s: float) -> None:
        self.is_torn = True

        def mend() -> None:
            self.is_torn = False

        self.clock.at(for_s, mend)

    def compact(self) -> None:
        self._break_watches("the history is compacted")

    def _break_watches(self, reason: str) -> None:
        for client in self.clients:
            client.break_watch(reason)

    def item(self, name: str, job: str) -> Item | None:
        """`job`: the name of one of its lives."""
        return self.memory._items.get(f"/elastrain/{job}/{name}")

    def commit(self, **transaction: Any) -> int | None:
        revision = self.memory.commit(**transaction)
        if revision is not None and transaction.get("put"):
            self.on_write(transaction["put"])
        return revision


class Client:
    """The store port of one agent. Each call that fails has cost `blocked_s` of its caller's time."""

    limit_s = _LIMIT_S

    def __init__(self, etcd: Etcd, owner: Process, *, late_s: float = 0.0) -> None:
        self._etcd, self._owner, self._late_s = etcd, owner, late_s
        self.blocked_s = 0.0
        self._watch: _Watch | None = None
        self.before_commit: Callable[[], None] = lambda: None
        """Others may be faster between a look and the transaction that rests upon it."""
        etcd.clients.append(self)

    def _check(self) -> None:
        if not self.is_reached:
            self.blocked_s += _LIMIT_S * self._etcd.clock.rng.choice((0.1, 0.25, 1.0))
            raise StoreUnavailableError("etcd does not answer")

    @property
    def is_reached(self) -> bool:
        return not self._etcd.is_away and self._etcd.network.reach_each_other(self._owner.node, STORE)

    def get(self, key: str) -> Item | None:
        self._check()
        return self._etcd.memory.get(key)

    def list(self, prefix: str) -> Listing:
        self._check()
        return self._etcd.memory.list(prefix)

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        self._check()
        self.before_commit()
        etcd, rng = self._etcd, self._etcd.clock.rng
        in_doubt = etcd.is_torn and rng.random() < 0.6
        if in_doubt and rng.random() < 0.5:
            raise StoreUnavailableError("etcd has not answered: nothing was written, but who knows")
        revision = etcd.commit(expect=expect, put=put, delete=delete, lease=lease)
        if in_doubt:
            raise StoreUnavailableError("etcd has not answered: it is written, but who knows")
        return revision

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> _Watch:
        self._watch = _Watch(self._owner, on_change, self._news_delay_s)
        self._watch.below = self._etcd.memory.watch(prefix, after_revision, self._watch.hear)
        return self._watch

    def _news_delay_s(self) -> float:
        rng, late = self._etcd.clock.rng, self._late_s
        usual = self._etcd.network.delay_s(STORE, self._owner.node)
        return usual + (rng.uniform(0, late) if late else 0.0)

    def on_broken(self, then: Callable[[], None]) -> None:
        """What its owner does once it has heard that the present watch is broken."""
        assert self._watch is not None
        self._watch.then = then

    def break_watch(self, reason: str) -> None:
        if self._watch is not None:
            self._watch.hear(Broken(reason=reason))
            self._watch.cancel()

    def grant(self, ttl_s: float) -> int:
        self._check()
        return self._etcd.memory.grant(ttl_s)

    def keep_alive(self, lease: int) -> None:
        self._check()
        self._etcd.memory.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        self._check()
        self._etcd.memory.revoke(lease)

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()


class _Watch:
    def __init__(self, owner: Process, on_change: Callable[[Change | Broken], None], delay_s: Callable[[], float]):
        self._owner, self._on_change, self._delay_s = owner, on_change, delay_s
        self._last_s = 0.0
        self._is_over = False
        self.below: Any = None
        self.then: Callable[[], None] = lambda: None

    def hear(self, change: Change | Broken) -> None:
        if self._is_over:
            return
        now = self._owner.clock.now
        self._last_s = max(now + self._delay_s(), self._last_s + 1e-6)
        self._owner.later(self._last_s - now, lambda: self._tell(change))

    def _tell(self, change: Change | Broken) -> None:
        self._on_change(change)
        if isinstance(change, Broken):
            self.then()

    def cancel(self) -> None:
        self._is_over = True
        if self.below is not None:
            self.below.cancel()
