"""The store port, in the shape of etcd v3: where views, specs and requests are agreed upon. And its memory form.

One writing primitive (a transaction guarded by revisions), list, watch, leases. No decision about membership here.

StoreError
├── StoreUnavailableError    nothing answered in time: go on without the store, try again later
├── StoreRefusedError        it will not let us in (password, role, TLS): fix the input (is a ConfigError, too)
├── LeaseLostError           the lease is gone: take a new one and write its keys again
└── ForgedValueError         a stored value was not written with the job's secret: never parse it
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastrain.errors import ConfigError, ElastrainError


@dataclass(frozen=True, kw_only=True)
class Item:
    """A key as stored; `revision` is that of its last change."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All items under a prefix, by key, as of one `revision` of the whole store: the place to watch from."""

    items: tuple[Item, ...]
    revision: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """A key was put, or deleted (`value` None)."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The watch has ended (compaction, connection lost): list again and watch from there."""

    reason: str


class StoreError(ElastrainError):
    """Root of what a store raises."""


class StoreUnavailableError(StoreError):
    """No endpoint answered in time. What a `commit` would have written may be there or not: read before repeating."""


class StoreRefusedError(StoreError, ConfigError):
    """The store answers and refuses us; waiting does not help."""


class LeaseLostError(StoreError):
    """The lease has expired or was revoked: take a new one and write the keys again."""


class ForgedValueError(StoreError):
    """A stored value does not verify with the job's secret: another job's, or tampered with."""


class Watch(Protocol):
    def cancel(self) -> None:
        """No callback begins after this returns."""


class Store(Protocol):
    """Revisions rise with each successful transaction and are never used twice. All methods are thread-safe.

    `watch` and `Watch.cancel` never wait for the network (`cancel` waits for a callback under way); nor does `close`
    for more than a second. Every other method blocks for up to `limit_s`, and then raises StoreUnavailableError: a loop
    that must not stand still calls them through `thread.StoreThread`. A store whose data was lost begins again
    with small revisions: watches break, leases are lost, and the owners of keys write them again.
    """

    limit_s: float

    def get(self, key: str) -> Item | None: ...

    def list(self, prefix: str) -> Listing: ...

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        """All or nothing: writes if each key in `expect` still has that revision (0: does not exist).

        Returns the new revision, or None if an expectation failed. Keys put under a `lease` go when it goes.
        Raises LeaseLostError if the lease is gone. Where the connection was lost meanwhile, the outcome is read back
        before anything is repeated: it is carried out once, or the call raises StoreUnavailableError.
        """

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> Watch:
        """Calls `on_change` for every change under `prefix` later than `after_revision`, in order, each once.

        It may be called from another thread. After a Broken nothing more comes.
        """

    def grant(self, ttl_s: float) -> int:
        """A new lease, of `ttl_s` or a little longer: etcd counts whole seconds, and has a least value (about 2 s)."""

    def keep_alive(self, lease: int) -> None:
        """Starts the lease's time anew. Raises LeaseLostError if it is gone."""

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes its keys; no error if it is gone."""

    def close(self) -> None: ...


class MemoryStore:
    """The store of a job with one agent. Leases expire by `clock`, looked at whenever the store is used."""

    limit_s = 0.0

    def __init__(self, clock: Callable[[], float] = time.monotonic, history: int = 1024) -> None:
        self._clock = clock
        # Re-entrant: a watcher may use the store in its callback.
        self._lock = threading.RLock()
        self._items: dict[str, Item] = {}
        self._revision = 1
        self._changes: deque[Change] = deque(maxlen=history)
        self._compacted = 1
        self._watches: list[_MemoryWatch] = []
        self._undelivered: deque[Change] = deque()
        self._delivering = False
        self._leases: dict[int, _Lease] = {}
        self._next_lease = 1

    def get(self, key: str) -> Item | None:
        with self._lock:
            self._expire()
            return self._items.get(key)

    def list(self, prefix: str) -> Listing:
        with self._lock:
            self._expire()
            items = tuple(self._items[key] for key in sorted(self._items) if key.startswith(prefix))
            return Listing(items=items, revision=self._revision)

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        with self._lock:
            self._expire()
            held = self._lease(lease) if lease is not None else None
            if any(self._revision_of(key) != revision for key, revision in expect.items()):
                return None
            changes: dict[str, bytes | None] = {**(put or {}), **dict.fromkeys(delete)}
            self._write(changes)
            for key in changes:
                for other in self._leases.values():
                    other.keys.discard(key)
            if held is not None:
                held.keys.update(put or {})
            return self._revision

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> _MemoryWatch:
        with self._lock:
            self._expire()
            watch = _MemoryWatch(self, prefix, on_change)
            if after_revision < self._compacted:
                on_change(Broken(reason=f"revision {after_revision} is compacted; the oldest is {self._compacted}"))
                return watch
            self._watches.append(watch)
            for change in [c for c in self._changes if c.revision > after_revision]:
                watch.deliver(change)
            return watch

    def grant(self, ttl_s: float) -> int:
        with self._lock:
            lease, self._next_lease = self._next_lease, self._next_lease + 1
            self._leases[lease] = _Lease(ttl_s=ttl_s, ends_s=self._clock() + ttl_s, keys=set())
            return lease

    def keep_alive(self, lease: int) -> None:
        with self._lock:
            self._expire()
            held = self._lease(lease)
            held.ends_s = self._clock() + held.ttl_s

    def revoke(self, lease: int) -> None:
        with self._lock:
            held = self._leases.pop(lease, None)
            if held is not None:
                self._write(dict.fromkeys(sorted(held.keys)))

    def close(self) -> None:
        with self._lock:
            self._watches.clear()

    def _revision_of(self, key: str) -> int:
        item = self._items.get(key)
        return item.revision if item else 0

    def _lease(self, lease: int) -> _Lease:
        if lease not in self._leases:
            raise LeaseLostError(f"lease {lease} has expired or was revoked: grant a new one and write its keys again")
        return self._leases[lease]

    def _expire(self) -> None:
        now = self._clock()
        for lease in [number for number, held in self._leases.items() if held.ends_s <= now]:
            self.revoke(lease)

    def _write(self, changes: Mapping[str, bytes | None]) -> None:
        real = {key: value for key, value in changes.items() if value is not None or key in self._items}
        if not real:
            return
        self._revision += 1
        for key, value in real.items():
            if value is None:
                del self._items[key]
            else:
                self._items[key] = Item(key=key, value=value, revision=self._revision)
            self._remember(Change(key=key, value=value, revision=self._revision))
        self._deliver()

    def _remember(self, change: Change) -> None:
        if len(self._changes) == self._changes.maxlen:
            self._compacted = self._changes[0].revision
        self._changes.append(change)
        self._undelivered.append(change)

    def _deliver(self) -> None:
        if self._delivering:  # a watcher writes in its callback: the outer call goes on, so that order is kept
            return
        self._delivering = True
        try:
            while self._undelivered:
                change = self._undelivered.popleft()
                for watch in tuple(self._watches):
                    watch.deliver(change)
        finally:
            self._delivering = False


@dataclass
class _Lease:
    ttl_s: float
    ends_s: float
    keys: set[str]


class _MemoryWatch:
    def __init__(self, store: MemoryStore, prefix: str, on_change: Callable[[Change | Broken], None]) -> None:
        self._store = store
        self._prefix = prefix
        self._on_change = on_change

    def deliver(self, change: Change) -> None:
        if change.key.startswith(self._prefix):
            self._on_change(change)

    def cancel(self) -> None:
        with self._store._lock:
            if self in self._store._watches:
                self._store._watches.remove(self)
