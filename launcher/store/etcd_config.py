"""Where etcd is and how to be let in: endpoints, TLS files, user and password. Values and files only, no connection."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from elastrain.errors import ConfigError

DEFAULT_PORT = 2379


@dataclass(frozen=True, kw_only=True)
class EtcdConfig:
    """`ca` turns TLS on; `cert` and `key` show who we are. Raises ConfigError for files that cannot serve."""

    endpoints: tuple[str, ...]
    """HOST:PORT each; IPv6 addresses in brackets."""
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: str | None = None
    limit_s: float = 4.0
    """The longest that one call may take, over all endpoints."""
    attempt_s: float = 1.0
    """The longest that one endpoint may keep silent before the next is asked."""

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
                # A password is given so that an encrypted key is refused, and never asked about on the terminal.
                context.load_cert_chain(self.cert, self.key, password="")
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(
                    f"{self.cert} and {self.key} are no certificate and its unencrypted key (PEM): {error}"
                ) from None


def parse_endpoints(text: str) -> tuple[str, ...]:
    """`HOST[:PORT][,…]`, as torchrun's --rdzv-endpoint; the port is 2379 by default. Raises ConfigError."""
    return tuple(_endpoint(part.strip(), text) for part in text.split(","))


def _endpoint(part: str, text: str) -> str:
    # What follows the closing bracket of an IPv6 address, or the only colon.
    host, colon, port = part.rpartition(":") if not part.endswith("]") and ":" in part else (part, "", "")
    host, port = (host, port) if colon else (part, str(DEFAULT_PORT))
    if not host or "/" in host or (":" in host and not host.startswith("[")):
        raise ConfigError(f"{text!r} is no list of etcd endpoints: write HOST:PORT[,HOST:PORT…], [IPv6]:PORT for IPv6")
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{text!r} is no list of etcd endpoints: {port!r} is not a port")
    return f"{host}:{port}"
