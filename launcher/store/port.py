"""The store port, in the shape of etcd v3, where the nodes agree on views and specs; and its form in memory.

One primitive for writing (a transaction guarded by revisions), list, watch, and leases. No decision about membership is
made here.

StoreError
├── StoreUnavailableError    no answer in time: go on without the store, and try again later
├── StoreRefusedError        access is refused (password, role, TLS): fix the input (also a ConfigError)
├── LeaseLostError           the lease is gone: create another and write its keys again
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
    """A key as stored. `revision` is that of its last change."""

    key: str
    value: bytes
    revision: int


@dataclass(frozen=True, kw_only=True)
class Listing:
    """All items under a prefix, sorted by key, at one `revision` of the whole store. A watch can start there."""

    items: tuple[Item, ...]
    revision: int


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a key. `value` is None if the key was deleted."""

    key: str
    value: bytes | None
    revision: int


@dataclass(frozen=True, kw_only=True)
class Broken:
    """The end of a watch (compaction, lost connection). The caller lists again and starts another watch."""

    reason: str


class StoreError(ElastrainError):
    """Base class of the errors of a store."""


class StoreUnavailableError(StoreError):
    """No endpoint answered in time. A `commit` may or may not have been carried out: read before repeating it."""


class StoreRefusedError(StoreError, ConfigError):
    """The store answers and refuses access. Waiting does not help."""


class LeaseLostError(StoreError):
    """The lease has expired or was revoked. Create another and write the keys again."""


class ForgedValueError(StoreError):
    """A stored value fails verification with the job's secret: it belongs to another job, or was changed."""


class Watch(Protocol):
    """A watch on a prefix of the store."""

    def cancel(self) -> None:
        """Stop the watch. No callback begins after this returns."""


class Store(Protocol):
    """A key-value store. Revisions rise with each transaction and are never reused. All methods are thread-safe.

    `watch` and `Watch.cancel` never wait for the network (`cancel` waits for a running callback), and `close` waits for
    a second at most. Every other method blocks for up to `limit_s` and then raises StoreUnavailableError. An event loop
    calls them through `store_thread.StoreThread`. A store that has lost its data begins again with small revisions:
    watches break, leases are lost, and the owners of keys write them again.
    """

    limit_s: float

    def get(self, key: str) -> Item | None:
        """Return the item under this key, or None."""
        ...

    def list(self, prefix: str) -> Listing:
        """Return all items under the prefix, and the store's revision."""
        ...

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        """Write all or nothing, if each key in `expect` still has that revision (0: the key does not exist).

        Returns the new revision, or None if an expectation failed. Keys put under a `lease` are deleted when it ends.
        Raises LeaseLostError if the lease is gone. If the connection is lost, the outcome is read back before a
        repetition, so the commit is carried out once, or the call raises StoreUnavailableError.
        """

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> Watch:
        """Call `on_change` for every change under `prefix` after `after_revision`, in order, each once.

        The calls may come from another thread. Nothing follows a Broken.
        """

    def grant(self, ttl_s: float) -> int:
        """Create a lease of `ttl_s` or a little longer: etcd counts whole seconds and has a minimum of about 2 s."""

    def keep_alive(self, lease: int) -> None:
        """Renew the lease for its whole time. Raises LeaseLostError if it is gone."""

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys. A lease that is gone is no error."""

    def close(self) -> None:
        """Release the store's resources."""
        ...


class MemoryStore:
    """A store in memory, for a job with one agent. Leases expire by `clock`, checked whenever the store is used."""

    limit_s = 0.0

    def __init__(self, clock: Callable[[], float] = time.monotonic, history: int = 1024) -> None:
        self._clock = clock
        # Re-entrant, because a watcher may use the store in its callback.
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
        """Return the item under this key, or None."""
        with self._lock:
            self._expire()
            return self._items.get(key)

    def list(self, prefix: str) -> Listing:
        """Return all items under the prefix, and the store's revision."""
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
        """Write all or nothing, as `Store.commit`."""
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
        """Call `on_change` for every change under `prefix` after `after_revision`, as `Store.watch`."""
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
        """Create a lease and return its number."""
        with self._lock:
            lease, self._next_lease = self._next_lease, self._next_lease + 1
            self._leases[lease] = _Lease(ttl_s=ttl_s, ends_s=self._clock() + ttl_s, keys=set())
            return lease

    def keep_alive(self, lease: int) -> None:
        """Renew the lease. Raises LeaseLostError if it is gone."""
        with self._lock:
            self._expire()
            held = self._lease(lease)
            held.ends_s = self._clock() + held.ttl_s

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys."""
        with self._lock:
            held = self._leases.pop(lease, None)
            if held is not None:
                self._write(dict.fromkeys(sorted(held.keys)))

    def close(self) -> None:
        """End all watches."""
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
        # a watcher has written in its callback: the outer call delivers this change too, so that the order is kept
        if self._delivering:
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
