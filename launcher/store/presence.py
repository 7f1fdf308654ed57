"""A key that exists for as long as its owner lives: written under a lease, renewed, and written again if lost.

The meaning of the value, and of a missing key, is not known here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from elastrain.launcher.store.port import LeaseLostError, Store, StoreError
from elastrain.launcher.store.store_thread import Inbox


@dataclass(frozen=True, kw_only=True)
class Present:
    """The newest value is in the store since this revision. Reported again once the store answers after an outage."""

    revision: int


@dataclass(frozen=True, kw_only=True)
class Lapsed:
    """The lease was lost, so the key was absent for a while. It is being written again.

    If an outage of the store outlasts the lease, or the store loses its data, all nodes' leases lapse at once. A
    missing key therefore proves its owner's death only to a node whose own lease has not lapsed meanwhile.
    """


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Another value is under the key: a living owner's, or that of an earlier start, which has not expired yet."""

    value: bytes


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """The last try failed, and another one follows."""

    error: StoreError


Report = Present | Lapsed | Taken | Unreachable


class _Values:
    """Values for the key: the one for now, and the one to write after a loss. Owner and thread both change them."""

    def __init__(self, value: bytes) -> None:
        self._lock = threading.Lock()
        self._now = self._after_loss = value

    @property
    def now(self) -> bytes:
        return self._now

    def replace(self, value: bytes) -> None:
        with self._lock:
            self._now = self._after_loss = value

    def replace_after_loss(self, value: bytes) -> None:
        with self._lock:
            self._after_loss = value

    def lost(self) -> None:
        with self._lock:
            self._now = self._after_loss


class Presence:
    """A key kept alive by a thread, which posts reports to the inbox.

    `value` must be unique to this start of the owner.
    """

    def __init__(
        self, store: Store, inbox: Inbox, key: str, value: bytes, ttl_s: float, on_report: Callable[[Report], None]
    ) -> None:
        self._store = store
        self.key = key
        self._values = _Values(value)
        self._written: bytes | None = None
        self._revision = 0
        self._lease: int | None = None
        self._ttl_s = ttl_s
        # The inbox's loop calls the owner; the thread never does.
        self._report: Callable[[Report], None] = lambda report: inbox.post(lambda: on_report(report))
        self._is_unreachable = False
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elastrain-presence-{key}", daemon=True)
        self._thread.start()

    def update(self, value: bytes) -> None:
        """Put this value under the key. A Present reports when it is there."""
        self._values.replace(value)
        self._wake.set()

    def after_loss(self, value: bytes) -> None:
        """Set the value to write if the key has been lost."""
        self._values.replace_after_loss(value)

    def close(self, timeout_s: float = 1.0) -> None:
        """Delete the key, for `timeout_s` at most. Otherwise it is deleted when its lease ends."""
        self._closed = True
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed:
            self._wake.clear()
            if self.turn():
                self._wake.wait(self._ttl_s / 3)
        self.leave()

    def turn(self) -> bool:
        """Renew the lease, and write the value if it has changed.

        Returns False if the lease was lost: call again at once.
        """
        try:
            wrote = self._beat()
            if self._is_unreachable and not wrote:
                self._report(Present(revision=self._revision))
            self._is_unreachable = False
        except LeaseLostError:
            self._lease, self._written, self._revision = None, None, 0
            self._values.lost()
            self._is_unreachable = False
            self._report(Lapsed())
            return False
        except StoreError as error:
            self._is_unreachable = True
            self._report(Unreachable(error=error))
        return True

    def _beat(self) -> bool:
        """Renew or create the lease. Returns True if the value was written and reported."""
        if self._lease is None:
            self._lease = self._store.grant(self._ttl_s)
        else:
            self._store.keep_alive(self._lease)
        wanted = self._values.now
        if self._written == wanted:
            return False
        self._write(wanted, self._lease)
        return True

    def _write(self, wanted: bytes, lease: int) -> None:
        revision = self._store.commit(expect={self.key: self._revision}, put={self.key: wanted}, lease=lease)
        if revision is None:
            # An earlier try may have been carried out although its answer was lost.
            there = self._store.get(self.key)
            if there is None or there.value != wanted:
                self._revision = 0
                if there is not None:
                    self._report(Taken(value=there.value))
                return
            revision = there.revision
        self._written, self._revision = wanted, revision
        self._report(Present(revision=revision))

    def leave(self) -> None:
        """Delete the key. If the store does not answer, it is deleted when its lease ends."""
        if self._lease is not None:
            with suppress(StoreError):
                self._store.revoke(self._lease)
