"""Connections to etcd: channels, endpoint failover, tokens and errors.

A call is repeated here until its time is over. The caller makes sure that this is harmless (see `etcd`). Nothing about
jobs is known here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
from pyetcd import etcdrpc as rpc

from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.port import LeaseLostError, StoreRefusedError, StoreUnavailableError

_PAUSE_S = 0.05
"""Pause before the next try."""
_CHANNEL_OPTIONS = (
    # An idle watch detects within 10 s that its endpoint is silent. etcd closes connections that ping more often than
    # every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 4000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # in fact the time limit of one connection attempt
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Without this, gRPC would send etcd's traffic through an HTTP proxy.
    ("grpc.enable_http_proxy", 0),
    # Without this, all stores of a process would share one connection and its failures.
    ("grpc.use_local_subchannel_pool", 1),
)
_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
}
_WRONG_TLS = ("CERTIFICATE", "Certificate", "certificate", "WRONG_VERSION_NUMBER", "Hostname", "TLSV1", "SSLV3")


class Endpoint:
    """One etcd endpoint: its channel, its services, and the token of the user."""

    def __init__(self, address: str, config: EtcdConfig) -> None:
        self.address = address
        self._channel = _channel(address, config)
        self.kv = rpc.KVStub(self._channel)
        self.lease = rpc.LeaseStub(self._channel)
        self.auth = rpc.AuthStub(self._channel)
        self.watch = rpc.WatchStub(self._channel)
        self.token: str | None = None

    def close(self) -> None:
        """Close the channel."""
        self._channel.close()


class Connection:
    """All endpoints and the one in use. A call tries one after the other until it is answered or its time is over."""

    def __init__(self, config: EtcdConfig) -> None:
        self._config = config
        self._endpoints = [Endpoint(address, config) for address in config.endpoints]
        self._left: list[Endpoint] = []
        """Endpoints that are endpoints no more. Other threads may still use their channels."""
        self._lock = threading.Lock()
        self._current = 0
        self._reached = False
        self._closed = threading.Event()
        self.on_silent: Callable[[Endpoint, str], None] = lambda endpoint, reason: None

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint that is in use."""
        with self._lock:
            return self._endpoints[self._current]

    def call(self, method: Callable[[Endpoint], Any], request: Any, until_s: float) -> Any:
        """Call until an endpoint answers.

        Raises StoreUnavailableError at `until_s` (monotonic), or what an error answer means.
        """
        trouble = "no time was left"
        while (left_s := until_s - time.monotonic()) > 0 and not self._closed.is_set():
            self._follow()
            endpoint = self.endpoint
            try:
                metadata = self.metadata(endpoint, min(left_s, self._config.attempt_s))
                answer = method(endpoint)(request, timeout=min(left_s, self._config.attempt_s), metadata=metadata)
            except grpc.RpcError as error:
                trouble = self._judge(endpoint, error)
            else:
                self._reached = True
                return answer
            self._closed.wait(min(_PAUSE_S, left_s))
        raise StoreUnavailableError(self._does_not_answer(trouble))

    def metadata(self, endpoint: Endpoint, timeout_s: float) -> tuple[tuple[str, str], ...]:
        """Return the metadata that authenticates a call, and log in first if needed. Raises grpc.RpcError."""
        if self._config.user is None:
            return ()
        if endpoint.token is None:
            request = rpc.AuthenticateRequest(name=self._config.user, password=self._config.password)
            endpoint.token = endpoint.auth.Authenticate(request, timeout=timeout_s).token
        return (("token", endpoint.token),)

    def close(self) -> None:
        """Close all channels. A call in progress ends at once."""
        self._closed.set()
        for endpoint in (*self._endpoints, *self._left):
            endpoint.close()

    def _follow(self) -> None:
        """Adopt the endpoints of now, if they have changed. Those that stay keep their channels."""
        addresses = self._config.current() if self._config.current is not None else ()
        with self._lock:
            known = {endpoint.address: endpoint for endpoint in self._endpoints}
            if not addresses or set(addresses) == known.keys():
                return
            used = self._endpoints[self._current].address
            self._endpoints = [known.pop(each) if each in known else Endpoint(each, self._config) for each in addresses]
            self._current = addresses.index(used) if used in addresses else 0
            self._left += known.values()
        for endpoint in known.values():
            self.on_silent(endpoint, f"{endpoint.address} is no endpoint of etcd any more")

    def _does_not_answer(self, trouble: str) -> str:
        said = f"etcd at {', '.join(self._config.endpoints)} does not answer ({trouble})"
        if self._reached:
            return said
        tls = "does it want TLS" if self._config.ca is None else "does it speak TLS"
        return f"{said}: is it running, is the address right, {tls}?"

    def _judge(self, endpoint: Endpoint, error: grpc.RpcError) -> str:
        """Return a description of the error if another try may help. Raises the error for the caller if not."""
        code, details = error.code(), error.details() or ""
        if "lease not found" in details:
            raise LeaseLostError(f"etcd: {details}: grant a new lease and write its keys again") from None
        if code is grpc.StatusCode.UNAUTHENTICATED or "auth store is old" in details:
            endpoint.token = None  # the token has expired, or etcd was restarted: log in again
            return details
        if code not in _TRANSIENT or (not self._reached and any(word in details for word in _WRONG_TLS)):
            raise StoreRefusedError(f"etcd at {endpoint.address} refuses: {_advice(details)}") from None
        trouble = f"{endpoint.address}: {_cause(details) or code.name}"
        self._go_on_from(endpoint, trouble)
        return trouble

    def _go_on_from(self, silent: Endpoint, reason: str) -> None:
        if len(self._endpoints) == 1:
            return
        with self._lock:
            if self._endpoints[self._current] is silent:
                self._current = (self._current + 1) % len(self._endpoints)
        self.on_silent(silent, reason)


def _channel(address: str, config: EtcdConfig) -> Any:
    if config.ca is None:
        return grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        root_certificates=config.ca.read_bytes(),
        private_key=config.key.read_bytes() if config.key else None,
        certificate_chain=config.cert.read_bytes() if config.cert else None,
    )
    return grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)


def _advice(details: str) -> str:
    if "authentication failed" in details:
        return "wrong user or password"
    if "user name is empty" in details or "not logged in" in details:
        return "it wants a user and a password, and none were given"
    if "authentication is not enabled" in details:
        return "it knows no users: leave user and password out"
    if "permission denied" in details:
        return "this user may not read and write the prefixes /elastrain/ and .elastrain/"
    if any(word in details for word in _WRONG_TLS):
        return f"the TLS files do not fit it ({_cause(details)})"
    return details


def _cause(details: str) -> str:
    """Return the last part of gRPC's long description of a failed connection, which is the cause."""
    if not details.startswith("failed to connect"):
        return details
    return details.removesuffix(": OK").rpartition(": ")[2].rpartition("OPENSSL_internal:")[2]
