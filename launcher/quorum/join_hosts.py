"""The hosts of --join: parsing, name look-ups, and which of them is this host.

In a pod of Kubernetes names get their addresses late, and other ones when their pods come back.
"""

from __future__ import annotations

import socket
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from elastrain.errors import ConfigError
from elastrain.launcher.core.quorum.founding import MEMBERS_MAX
from elastrain.launcher.store.etcd_config import split_endpoint

DEFAULT_PORT = 29400
"""Port of the agents' own service. etcd's clients use the next port, and its members the one after that."""
PORTS = 3
"""Number of these ports, which follow one another."""


@dataclass(frozen=True, kw_only=True)
class NamedHost:
    """A host of --join. `address` is its first IP address, as this host sees it; "" while its name has none."""

    name: str
    address: str


@dataclass(frozen=True, kw_only=True)
class JoinHosts:
    """The hosts of --join, their common port, and this host's place among them."""

    hosts: tuple[NamedHost, ...]
    port: int
    place: int | None
    """Position of this host, or None if --join does not name it."""

    def address(self) -> str:
        """Return this host's address for the others: the one that --join names, else the one on the way to them."""
        mine = self.hosts[self.place].address if self.place is not None else ""
        if mine and not _is_loopback(mine):
            return mine
        others = [host for place, host in enumerate(self.hosts) if place != self.place]
        return _address_towards((others or list(self.hosts))[0].address, self.port)


def parse_join(text: str, default_port: int = DEFAULT_PORT) -> tuple[tuple[str, ...], int]:
    """Parse `HOST[:PORT][,HOST[:PORT]…]`. Returns the hosts and the port. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MEMBERS_MAX:
        raise ConfigError(
            f"--join {text} names {len(parts)} hosts: name {MEMBERS_MAX} at most; other nodes join through them"
        )
    found = [split_endpoint(part) for part in parts]
    for part, (host, port) in zip(parts, found, strict=True):
        is_port = not port or (port.isdecimal() and 0 < int(port) < 65534)
        if not host or "/" in host or not is_port:
            raise ConfigError(f"--join {text}: {part!r} is not HOST or HOST:PORT")
    ports = {int(port) if port else default_port for _, port in found}
    if len(ports) > 1:
        raise ConfigError(f"--join {text}: all hosts use one port, and these are {sorted(ports)}")
    hosts = tuple(host for host, _ in found)
    for host in hosts:
        if hosts.count(host) > 1:
            raise ConfigError(f"--join {text} names {host} twice: name each host once")
    return hosts, ports.pop()


def ports_beside(join: str, ports: tuple[int, int]) -> tuple[int, int]:
    """Return the part of --port-range that the quorum leaves to agents and members, the longer one of two.

    The quorum's ports are the first ones of the range, unless --join names a port. Raises ConfigError if they do not
    lie in the range.
    """
    first, last = ports
    _, port = parse_join(join, first)
    if not first <= port <= last - PORTS + 1:
        raise ConfigError(
            f"--join {join}: its ports {port} to {port + PORTS - 1} do not lie in --port-range {first}-{last}: name "
            "another port, or none, and the first three of the range are taken"
        )
    below, above = (first, port - 1), (port + PORTS, last)
    return below if below[1] - below[0] > above[1] - above[0] else above


def look_up(
    text: str, own: str | None = None, default_port: int = DEFAULT_PORT, *, in_a_pod: bool = False
) -> JoinHosts:
    """Return the hosts of --join with their addresses. `own`: this node's address, if it was given.

    Raises ConfigError for names without an address, unless `in_a_pod`, and for two names of one host.
    """
    names, port = parse_join(text, default_port)
    if in_a_pod and own is not None:
        me = socket.gethostname().partition(".")[0]
        place = next((at for at, name in enumerate(names) if name.partition(".")[0] == me), None)
        # The name of this pod may still lead to the one before it.
        hosts = tuple(
            NamedHost(name=name, address=own if at == place else _address_if_any(name, port))
            for at, name in enumerate(names)
        )
        return JoinHosts(hosts=hosts, port=port, place=place)
    hosts = tuple(NamedHost(name=name, address=resolve(name, port)) for name in names)
    for place, host in enumerate(hosts):
        twin = next((other for other in hosts[:place] if other.address == host.address), None)
        if twin is not None:
            raise ConfigError(f"--join names one host twice: {twin.name} and {host.name} are both {host.address}")
    # A given address decides, because nodes of a test may share all addresses of one machine.
    mine = [place for place, host in enumerate(hosts) if (host.address == own if own else is_local(host.address))]
    if len(mine) > 1:
        first, second = hosts[mine[0]].name, hosts[mine[1]].name
        raise ConfigError(f"--join: {second} is this host under another name, and so is {first}: name it once")
    return JoinHosts(hosts=hosts, port=port, place=mine[0] if mine else None)


class HostAddresses:
    """The present addresses of the named hosts. A name is looked up anew, in the pool, if its host does not answer."""

    def __init__(self, join: JoinHosts, pool: ThreadPoolExecutor) -> None:
        self._join, self._pool = join, pool
        self._found = [host.address for host in join.hosts]
        self._under_way: dict[int, Future[None]] = {}

    def of(self, place: int) -> str:
        """Return the last known address of a host, or "" if its name has had none so far."""
        return self._found[place]

    def renew(self, place: int) -> None:
        """Begin to look the host's name up, unless that is under way."""
        before = self._under_way.get(place)
        if before is None or before.done():
            self._under_way[place] = self._pool.submit(self._look_up, place)

    def _look_up(self, place: int) -> None:
        host = self._join.hosts[place]
        self._found[place] = _address_if_any(host.name, self._join.port) or self._found[place]


def is_local(address: str) -> bool:
    """Return True if a socket here can be bound to the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind((address, 0))
        except OSError:
            return False
    return True


def resolve(name: str, port: int) -> str:
    """Return the first address of a name. Raises ConfigError if it has none."""
    try:
        return str(socket.getaddrinfo(name.strip("[]"), port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--join: {name} cannot be reached: it has no address here ({error.strerror})") from None


def _address_if_any(name: str, port: int) -> str:
    with suppress(ConfigError):
        return resolve(name, port)
    return ""


def _address_towards(address: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((address, port))  # sends nothing
        except OSError as error:
            raise ConfigError(f"--join: there is no way to {address} from here ({error.strerror})") from None
        return str(sock.getsockname()[0])


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
