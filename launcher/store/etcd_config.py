"""The configuration of the connection to etcd: endpoints, TLS files, user. Values and files only, no gRPC."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from elastrain.errors import ConfigError

DEFAULT_PORT = 2379


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """The configuration of the connection. `ca` turns TLS on; `cert` and `key` are the client's.

    Raises ConfigError for options that contradict each other, and for files that cannot be used.
    """

    endpoints: tuple[str, ...]
    """Endpoints in the form HOST:PORT, with IPv6 addresses in brackets."""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = None
    limit_s: float = 4.0
    """Longest time that one call may take, over all endpoints."""
    attempt_s: float = 1.0
    """Longest time that one endpoint may be silent before the next one is asked."""
    current: Callable[[], tuple[str, ...]] | None = None
    """Function that returns the endpoints of now, if they change while the job runs. It is called before each call."""

    def __post_init__(self) -> None:
        if not self.endpoints:
            raise ConfigError("no etcd endpoint was given: write HOST:PORT[,HOST:PORT…]")
        if (self.user is None) != (self.password is None):
            raise ConfigError("etcd's user and password go together: give both or neither")
        if (self.cert is None) != (self.key is None):
            raise ConfigError("etcd's client certificate and its key go together: give both files or neither")
        if self.cert is not None and self.ca is None:
            raise ConfigError(
                "a client certificate for etcd needs the file of the authority (CA) that signed etcd's own"
            )
        self._check_files()

    def _check_files(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"{self.ca} is no file of CA certificates (PEM): {error}") from None
        if self.cert is not None and self.key is not None:
            try:
                # With a password an encrypted key is refused. Without one, OpenSSL would ask for it on the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"{self.cert} and {self.key} are no certificate and its unencrypted key (PEM): {error}"
                ) from None


def parse_endpoints(text: str) -> tuple[str, ...]:
    """Parse `HOST[:PORT][,…]`, as in torchrun's --rdzv-endpoint. The default port is 2379. Raises ConfigError."""
    return tuple(_endpoint(part.strip(), text) for part in text.split(","))


def _endpoint(part: str, text: str) -> str:
    host, port = split_endpoint(part)
    port = port or str(DEFAULT_PORT)
    if not host or "/" in host or (":" in host and not host.startswith("[")):
        raise ConfigError(f"{text!r} is no list of etcd endpoints: write HOST:PORT[,HOST:PORT…], [IPv6]:PORT for IPv6")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no list of etcd endpoints: {port!r} is not a port")
    return f"{host}:{port}"


def split_endpoint(part: str) -> tuple[str, str]:
    """Split `HOST[:PORT]` into the host and the port. The port is "" if none is given."""
    # The port follows the closing bracket of an IPv6 address, or the only colon.
    host, colon, port = part.rpartition(":") if not part.endswith("]") and ":" in part else (part, "", "")
    return (host, port) if colon else (part, "")
