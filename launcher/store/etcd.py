"""The store port on a real etcd v3. Only this file and `etcd_connection` know etcd's messages (`pyetcd`) and gRPC.

No decision about membership is made here, and the only threads are those of watches. pyetcd's own client is not used:
it avoids an endpoint for 300 s after one error, and its watches do not report why they ended.

Beside the keys that callers write, each store keeps one key `.elastrain/commits/<random>` (the mark) under a short
lease of its own. It shows a repeated commit that the first attempt was already carried out. A user limited by roles
needs the prefixes `/elastrain/` and `.elastrain/`.
"""

from __future__ import annotations

import math
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import grpc
from pyetcd import etcdrpc as rpc

from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.etcd_connection import Connection, Endpoint
from elastrain.launcher.store.port import (
    Broken,
    Change,
    Item,
    LeaseLostError,
    Listing,
    StoreRefusedError,
    StoreUnavailableError,
)

_MARK_TTL_S = 60
"""Longer than any call's limit: a mark must exist as long as its commit may be repeated."""
_CLOSE_S = 0.5


class EtcdStore:
    """A client of etcd. Each call blocks for up to `config.limit_s`; nothing is sent before the first call."""

    def __init__(self, config: EtcdConfig) -> None:
        self.limit_s = config.limit_s
        self._connection = Connection(config)
        self._watches: set[_EtcdWatch] = set()
        self._watches_lock = threading.Lock()
        # One commit at a time, because the mark identifies only the last one.
        self._commit_lock = threading.Lock()
        self._mark = f".elastrain/commits/{secrets.token_hex(8)}".encode()
        self._mark_lease: int | None = None
        self._mark_lease_until_s = 0.0
        self._connection.on_silent = self._break_watches

    def check(self) -> None:
        """Test that etcd answers and admits this client. Raises StoreUnavailableError or StoreRefusedError."""
        self.get("/elastrain/")

    def get(self, key: str) -> Item | None:
        """Return the item under this key, or None."""
        response = self._call(lambda e: e.kv.Range, rpc.RangeRequest(key=key.encode()), self._until())
        return _item(response.kvs[0]) if response.kvs else None

    def list(self, prefix: str) -> Listing:
        """Return all items under the prefix, and the store's revision."""
        key, end = _range(prefix)
        response = self._call(lambda e: e.kv.Range, rpc.RangeRequest(key=key, range_end=end), self._until())
        return Listing(items=tuple(_item(kv) for kv in response.kvs), revision=response.header.revision)

    def commit(
        self,
        *,
        expect: Mapping[str, int],
        put: Mapping[str, bytes] | None = None,
        delete: Sequence[str] = (),
        lease: int | None = None,
    ) -> int | None:
        """Write if all keys in `expect` have the given revisions. Returns the new revision, or None if one differs."""
        until_s = self._until()
        if not self._commit_lock.acquire(timeout=self.limit_s):
            raise StoreUnavailableError("another commit of this store is still waiting for etcd: nothing was written")
        try:
            token = secrets.token_bytes(16)
            while True:
                mark_lease = self._renewed_mark_lease(until_s)
                request = self._marked(_guarded(expect, put or {}, delete, lease), token, mark_lease)
                try:
                    return _outcome(self._call(lambda e: e.kv.Txn, request, until_s))
                except LeaseLostError:
                    # The lost lease is the caller's, or the mark's after etcd has lost its data. If the mark's is
                    # alive, it was the caller's.
                    if self._is_alive(mark_lease, until_s):
                        raise
                    self._mark_lease = None
        finally:
            self._commit_lock.release()

    def watch(self, prefix: str, after_revision: int, on_change: Callable[[Change | Broken], None]) -> _EtcdWatch:
        """Report every change under the prefix after this revision. The callback runs in a thread of the watch."""
        watch = _EtcdWatch(self._connection, prefix, after_revision, on_change, self._forget_watch)
        with self._watches_lock:
            self._watches.add(watch)
        watch.start()
        return watch

    def grant(self, ttl_s: float) -> int:
        """Create a lease and return its number."""
        # The number is chosen here, so that a repeated request finds its own lease instead of leaving another one
        # behind.
        lease = secrets.randbelow(2**62) + 1
        self._call(lambda e: e.lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s), ID=lease), self._until())
        return lease

    def keep_alive(self, lease: int) -> None:
        """Renew the lease. Raises LeaseLostError if it is gone."""
        answer = self._call(_keep_alive_once, rpc.LeaseKeepAliveRequest(ID=lease), self._until())
        if answer.TTL <= 0:
            raise LeaseLostError(f"lease {lease} has expired or was revoked: grant a new one and write its keys again")

    def revoke(self, lease: int) -> None:
        """End the lease, which deletes its keys. A lease that is gone is no error."""
        with suppress(LeaseLostError):  # the lease is gone, as asked for
            self._call(lambda e: e.lease.LeaseRevoke, rpc.LeaseRevokeRequest(ID=lease), self._until())

    def compact(self) -> int:
        """Make etcd drop all revisions but the newest, and return that. Only tests use this."""
        revision = self.list("/elastrain/").revision
        request = rpc.CompactionRequest(revision=revision, physical=True)
        try:
            self._call(lambda e: e.kv.Compact, request, self._until())
        except StoreRefusedError as error:
            if "has been compacted" not in str(error):  # nothing was written since the last compaction
                raise
        return revision

    def close(self) -> None:
        """Cancel all watches, give the mark's lease back, and close the connection."""
        with self._watches_lock:
            watches = tuple(self._watches)
        for watch in watches:
            watch.cancel()
        if self._mark_lease is not None:
            request, until_s = rpc.LeaseRevokeRequest(ID=self._mark_lease), time.monotonic() + _CLOSE_S
            self._mark_lease = None
            with suppress(LeaseLostError, StoreUnavailableError, StoreRefusedError):  # the lease expires by itself
                self._call(lambda e: e.lease.LeaseRevoke, request, until_s)
        self._connection.close()

    def _marked(self, guarded: Any, token: bytes, lease: int) -> Any:
        """Wrap a transaction so that it is carried out once.

        If the mark holds the token, the commit was done, and the mark's revision is read. Otherwise the transaction is
        tried, and sets the mark with it.
        """
        done = rpc.Compare(
            result=rpc.Compare.EQUAL, target=rpc.Compare.VALUE, key=self._mark, value=token
        )  # never true for a key that does not exist
        guarded.success.append(rpc.RequestOp(request_put=rpc.PutRequest(key=self._mark, value=token, lease=lease)))
        return rpc.TxnRequest(
            compare=[done],
            success=[rpc.RequestOp(request_range=rpc.RangeRequest(key=self._mark))],
            failure=[rpc.RequestOp(request_txn=guarded)],
        )

    def _renewed_mark_lease(self, until_s: float) -> int:
        """Return the lease of the mark. It outlives any commit that starts now."""
        if self._mark_lease is None or time.monotonic() + self.limit_s > self._mark_lease_until_s:
            lease = secrets.randbelow(2**62) + 1
            self._mark_lease_until_s = time.monotonic() + _MARK_TTL_S
            self._call(lambda e: e.lease.LeaseGrant, rpc.LeaseGrantRequest(TTL=_MARK_TTL_S, ID=lease), until_s)
            self._mark_lease = lease
        return self._mark_lease

    def _is_alive(self, lease: int, until_s: float) -> bool:
        request = rpc.LeaseTimeToLiveRequest(ID=lease)
        return bool(self._call(lambda e: e.lease.LeaseTimeToLive, request, until_s).TTL > 0)

    def _until(self) -> float:
        return time.monotonic() + self.limit_s

    def _call(self, method: Callable[[Endpoint], Any], request: Any, until_s: float) -> Any:
        return self._connection.call(method, request, until_s)

    def _break_watches(self, endpoint: Endpoint, reason: str) -> None:
        with self._watches_lock:
            watches = tuple(self._watches)
        for watch in watches:
            if watch.endpoint is endpoint:
                watch.break_off(reason)

    def _forget_watch(self, watch: _EtcdWatch) -> None:
        with self._watches_lock:
            self._watches.discard(watch)


class _EtcdWatch:
    """A watch: one stream, read by its own thread."""

    def __init__(
        self,
        connection: Connection,
        prefix: str,
        after_revision: int,
        on_change: Callable[[Change | Broken], None],
        on_end: Callable[[_EtcdWatch], None],
    ) -> None:
        self._connection = connection
        self.endpoint = connection.endpoint
        self._prefix = prefix
        self._after_revision = after_revision
        self._on_change = on_change
        self._on_end = on_end
        # Held while a callback runs. Re-entrant, because the callback may cancel the watch.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._stream: Any = None
        self._thread = threading.Thread(target=self._run, name=f"elastrain-watch-{prefix}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        with self._lock:
            self._end()

    def break_off(self, reason: str) -> None:
        self._report(Broken(reason=reason))

    def _run(self) -> None:
        try:
            metadata = self._connection.metadata(self.endpoint, 1.0)
            stream = self.endpoint.watch.Watch(self._requests(), metadata=metadata)
            with self._lock:
                self._stream = stream
                if self._ended.is_set():
                    stream.cancel()
            for response in stream:
                self._take(response)
                if self._ended.is_set():
                    return
            self._report(Broken(reason=f"{self.endpoint.address} has ended the watch"))
        except (grpc.RpcError, ValueError) as error:  # ValueError: the channel was closed meanwhile
            if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.UNAUTHENTICATED:
                self.endpoint.token = None
            details = error.details() if isinstance(error, grpc.RpcError) else str(error)
            self._report(Broken(reason=f"{self.endpoint.address}: {details}"))

    def _requests(self) -> Iterator[Any]:
        key, end = _range(self._prefix)
        create = rpc.WatchCreateRequest(key=key, range_end=end, start_revision=self._after_revision + 1)
        yield rpc.WatchRequest(create_request=create)
        self._ended.wait()  # etcd ends the stream when its requests end

    def _take(self, response: Any) -> None:
        if response.compact_revision:
            oldest = response.compact_revision
            self._report(Broken(reason=f"revision {self._after_revision} is compacted; the oldest is {oldest}"))
        elif response.canceled:
            self._report(Broken(reason=f"etcd has cancelled the watch: {response.cancel_reason}"))
        elif response.header.revision < self._after_revision:
            # Such a watch would be silent until the new store has reached the old revision.
            now, before = response.header.revision, self._after_revision
            self._report(
                Broken(reason=f"etcd is at revision {now} and was at {before}: its data was lost, or lags behind")
            )
        for event in response.events:
            value = event.kv.value if event.type == event.PUT else None
            self._report(Change(key=event.kv.key.decode(), value=value, revision=event.kv.mod_revision))

    def _report(self, change: Change | Broken) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            if isinstance(change, Broken):
                self._end()
            self._on_change(change)

    def _end(self) -> None:
        self._ended.set()
        if self._stream is not None:
            self._stream.cancel()
        self._on_end(self)


def _keep_alive_once(endpoint: Endpoint) -> Callable[..., Any]:
    """Return a function that renews a lease once. etcd offers only a stream for this; it carries one request here."""

    def call(request: Any, timeout: float, metadata: Any) -> Any:
        return next(endpoint.lease.LeaseKeepAlive(iter([request]), timeout=timeout, metadata=metadata))

    return call


def _guarded(expect: Mapping[str, int], put: Mapping[str, bytes], delete: Sequence[str], lease: int | None) -> Any:
    compare = [
        rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key.encode(), mod_revision=revision)
        for key, revision in expect.items()
    ]
    puts = [rpc.PutRequest(key=key.encode(), value=value, lease=lease or 0) for key, value in put.items()]
    deletes = [rpc.DeleteRangeRequest(key=key.encode()) for key in delete]
    success = [rpc.RequestOp(request_put=p) for p in puts] + [rpc.RequestOp(request_delete_range=d) for d in deletes]
    return rpc.TxnRequest(compare=compare, success=success)


def _outcome(answer: Any) -> int | None:
    if answer.succeeded:
        return int(answer.responses[0].response_range.kvs[0].mod_revision)
    return int(answer.header.revision) if answer.responses[0].response_txn.succeeded else None


def _range(prefix: str) -> tuple[bytes, bytes]:
    """Return a prefix as etcd's half-open range of keys [start, end)."""
    key = prefix.encode()
    return (key, key[:-1] + bytes([key[-1] + 1])) if key else (b"\0", b"\0")  # UTF-8 has no byte 255


def _item(kv: Any) -> Item:
    return Item(key=kv.key.decode(), value=kv.value, revision=kv.mod_revision)
