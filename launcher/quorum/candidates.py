"""The keys of agents that are or could become etcd members. Each lives by a lease of its agent."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from elastrain.launcher.core.quorum.quorum_members import QuorumCandidate
from elastrain.launcher.store.port import ForgedValueError, LeaseLostError, StoreError
from elastrain.launcher.store.registry import LEASE_S
from elastrain.launcher.store.sealed import SealedStore

_TOLD = msgspec.json.Decoder(dict[str, bool])


class Candidates:
    """The key of this agent, and the list of all keys. `may_come`: False for an agent that gets no key."""

    def __init__(self, store: SealedStore, job: str, *, is_named: bool, may_come: bool = True) -> None:
        self._store, self._is_named, self._may_come = store, is_named, may_come
        self._prefix = f"/elastrain/.quorum/{job}/"
        self._lease: int | None = None
        self._instance = ""

    def keep(self, instance: str) -> None:
        """Keep the key of this instance alive. Raises StoreError."""
        if not self._may_come:
            return
        if instance != self._instance:
            self.withdraw()
        if self._lease is not None:
            try:
                self._store.keep_alive(self._lease)
                return
            except LeaseLostError:
                self._lease = None
        lease = self._store.grant(LEASE_S)
        value = msgspec.json.encode({"named": self._is_named})
        self._store.commit(expect={}, put={self._prefix + instance: value}, lease=lease)
        self._lease, self._instance = lease, instance

    def withdraw(self) -> None:
        """Delete the key. In an outage it ends with its lease."""
        lease, self._lease, self._instance = self._lease, None, ""
        if lease is not None:
            with suppress(StoreError):
                self._store.revoke(lease)

    def list(self) -> tuple[QuorumCandidate, ...]:
        """Return all agents with a key. Raises StoreError."""
        try:
            items = self._store.list(self._prefix).items
        except ForgedValueError:
            return ()  # without this job's secret nobody becomes a member
        return tuple(
            QuorumCandidate(
                instance=item.key.removeprefix(self._prefix),
                is_named=_TOLD.decode(item.value).get("named", False),
                since=item.revision,
            )
            for item in items
        )

    def close(self) -> None:
        """Close the store."""
        self._store.close()
