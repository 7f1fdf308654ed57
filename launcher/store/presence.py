"""A key that says "I am here" for as long as its owner lives: written under a lease, kept alive, written again if lost.

What is in the value, and what others make of its absence, is not known here.
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
    """The newest value is in the store, as of this revision. Told again once the store answers after an outage."""

    revision: int


@dataclass(frozen=True, kw_only=True)
class Lapsed:
    """The lease was lost: for a while others saw us gone. It is being written again.

    Where an outage of the store outlasts the lease (or it came back without its data), everybody's lapses at once: a
    key that is missing proves its owner's death only to those whose own presence has not lapsed meanwhile.
    """


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Somebody else's value is under the key: one like us that lives, or our own past that has not expired yet."""

    value: bytes


@dataclass(frozen=True, kw_only=True)
class Unreachable:
    """The last try failed; the next follows."""

    error: StoreError


Report = Present | Lapsed | Taken | Unreachable


class _Values:
    """What is to be under the key: now, and where it was lost and is written again. Owner and thread both change it."""

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
    """Reports are posted to the inbox. `value` must differ from that of any other owner: let it hold an incarnation."""

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
        # Reports go to the loop that the inbox belongs to, never straight to the owner.
        self._report: Callable[[Report], None] = lambda report: inbox.post(lambda: on_report(report))
        self._is_unreachable = False
        self._closed = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elastrain-presence-{key}", daemon=True)
        self._thread.start()

    def update(self, value: bytes) -> None:
        """Have this value there instead; a Present tells when it is."""
        self._values.replace(value)
        self._wake.set()

    def after_loss(self, value: bytes) -> None:
        """Have this value there where the key has been lost, and is written again."""
        self._values.replace_after_loss(value)

    def close(self, timeout_s: float = 1.0) -> None:
        """Take the key away, for `timeout_s` at most; else it goes with its lease."""
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
        """One sign of life. False: the lease was lost, and the next one is due at once."""
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
        """Whether anything was written, and reported."""
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
            # Ours after all, if an earlier try was carried out and its answer lost.
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
        """Take the key away; if the store does not answer, it goes with its lease."""
        if self._lease is not None:
            with suppress(StoreError):
                self._store.revoke(self._lease)
