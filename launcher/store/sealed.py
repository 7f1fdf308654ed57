"""A store whose values are authenticated with the job's secret, so that foreign values in etcd are never parsed.

A seal covers key and value: a value cannot be moved to another key or another job. The seal does not cover time: an
attacker who can write into etcd can restore an older value of the same key, or delete it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence

from elastrain.base.environment import job_of
from elastrain.launcher.store.port import Broken, Change, ForgedValueError, Item, Listing, Store, Watch

_SEAL_SIZE_BYTES = 32


def hint_key(job: str) -> str:
    """Return the key of a hint for people where the job's secret lies. Its value is the only one without a seal."""
    return f"/elastrain/.secrets/{job_of(job)}"


class SealedStore:
    """A store that seals and verifies values. `secret` has 32 bytes or more.

    Reading raises ForgedValueError, and a watch breaks, if a value does not verify.
    """

    def __init__(self, store: Store, secret: bytes) -> None:
        if len(secret) < 32:
            raise ValueError(f"a job's secret has 32 bytes or more, not {len(secret)}")
        self._store = store
        self.secret = secret
        """The job's secret, for code that talks with the other nodes of the job."""
        self._key = hmac.digest(secret, b"elastrain: values in the store", "sha256")
        self.limit_s = store.limit_s

    def get(self, key: str) -> Item | None:
        """Return the verified item under this key, or None. Raises ForgedValueError."""
        item = self._store.get(key)
        return None if item is None else self._opened(item)

    def list(self, prefix: str) -> Listing:
        """Return all verified items under the prefix. Raises ForgedValueError."""
        listing = self._store.list(prefix)
        return Listing(items=tuple(self._opened(item) for item in listing.items), revision=listing.revision)

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        """Seal the values and commit, as `Store.commit`."""
        sealed = {key: self._seal(key, value) + value for key, value in (put or {}).items()}
        return self._store.commit(expect=expect, put=sealed, delete=delete, lease=lease)

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> Watch:
        """Watch the prefix. The watch ends with Broken at the first value that does not verify."""
        return _SealedWatch(self, prefix, after_revision, on_change)

    def grant(self, ttl_s: float) -> int:
        """Create a lease and return its number."""
        return self._store.grant(ttl_s)

    def keep_alive(self, lease: int) -> None:
        """Renew the lease. Raises LeaseLostError if it is gone."""
        self._store.keep_alive(lease)

    def revoke(self, lease: int) -> None:
        """End the lease and delete its keys."""
        self._store.revoke(lease)

    def close(self) -> None:
        """Close the store below."""
        self._store.close()

    def open_value(self, key: str, sealed: bytes) -> bytes:
        """Return the value without its seal. Raises ForgedValueError if the seal does not verify."""
        seal, value = sealed[:_SEAL_SIZE_BYTES], sealed[_SEAL_SIZE_BYTES:]
        if not hmac.compare_digest(seal, self._seal(key, value)):
            raise ForgedValueError(
                f"{key} was not written with this job's secret: another job with the same id, a node with another"
                " secret file, or another program writes there; choose another --rdzv-id, or copy the secret file"
            )
        return value

    def _opened(self, item: Item) -> Item:
        return Item(key=item.key, value=self.open_value(item.key, item.value), revision=item.revision)

    def _seal(self, key: str, value: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._key, len(name).to_bytes(8, "big") + name + value, "sha256")


class _SealedWatch:
    """A watch that passes on verified values and ends with Broken at the first other one."""

    def __init__(
        self, sealed: SealedStore, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]
    ) -> None:
        self._sealed = sealed
        self._on_change = on_change
        self._forged = False
        self._watch = sealed._store.watch(prefix, after_revision, self._take)

    def cancel(self) -> None:
        self._watch.cancel()

    def _take(self, change: Change | Broken) -> None:
        if self._forged:
            return
        if isinstance(change, Change) and change.value is not None:
            try:
                value = self._sealed.open_value(change.key, change.value)
            except ForgedValueError as error:
                self._forged = True
                change = Broken(reason=str(error))
            else:
                change = Change(key=change.key, value=value, revision=change.revision)
        self._on_change(change)
