"""Hosts made of network namespaces. Each has an address and a cable to one switch, and its processes see nothing else.

The switch is a bridge in a namespace of its own. `impairments` decides on faults between hosts. The programs `ip` and
`tc` (iproute2) and `nft` (nftables) make and change the network. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from elastrain.errors import ElastrainError
from elastrain.launcher.namespaces.impairments import Condition, drop_rules

_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
_TIMEOUT_S = 10.0
_CLONE_NEWNET = 0x40000000


class NetworkError(ElastrainError):
    """A network could not be made or changed. The text has the command, and the answer of the kernel."""


def lacking() -> str | None:
    """Return why this machine cannot have network namespaces and what to do, or None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root: start it as root, or leave --netns out"
    missing = sorted({package for program, package in _PACKAGES.items() if shutil.which(program) is None})
    if missing:
        return f"network namespaces need the programs ip, tc and nft: install {' and '.join(missing)}"
    name = f"elastrain-{os.getpid()}-try"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except NetworkError as error:
        return f"this machine does not let network namespaces be made ({error}): leave --netns out"
    return None


def ip(*words: str, namespace: str | None = None) -> None:
    """Run the program ip. Raises NetworkError."""
    _run("ip", *(("-n", namespace) if namespace else ()), *words)


def tc(*words: str, namespace: str) -> None:
    """Run the program tc in a namespace. Raises NetworkError."""
    _run("tc", "-n", namespace, *words)


def nft(commands: str, *, namespace: str) -> None:
    """Run nft commands in a namespace, all or none of them. Raises NetworkError."""
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", given=commands)


def enter(namespace: str) -> None:
    """Move the calling thread to a namespace. Threads and processes that it starts later are there too.

    Open sockets stay in their namespace. Raises NetworkError.
    """
    try:
        descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise NetworkError(f"there is no network namespace {namespace} ({error})") from None
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) != 0:
            raise NetworkError(f"network namespace {namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)


def _run(*command: str, given: str = "") -> None:
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, cwd="/"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NetworkError(f"{' '.join(command)}: {error}") from None
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: {done.stderr.strip() or f'it ends with {done.returncode}'}")


_NETWORK = "10.77.0"
SWITCH = "switch"
"""Name of the switch's own host. Services of the network, such as etcd, run there."""
SWITCH_ADDRESS = f"{_NETWORK}.1"
_QUEUE = ("burst", "32kb", "latency", "400ms")
"""Queue of a slow cable. Packets that wait longer than its latency are dropped."""


class Switch:
    """A switch with hosts plugged in. All namespaces are removed when the `with` block ends.

    `name` is the name of the job; namespaces are called `elastrain-NAME-HOST`. `on_made` is called with the name of
    each namespace before it exists, so that it can be removed if this process is killed. Methods that change the
    network raise NetworkError.
    """

    def __init__(self, name: str, hosts: Sequence[str], on_made: Callable[[str], None] = lambda _: None) -> None:
        self._prefix, self._on_made = f"elastrain-{name}-", on_made
        self.hosts = tuple(hosts)
        self._open = ExitStack()
        self._condition = Condition()

    def __enter__(self) -> Switch:
        try:
            self._make(SWITCH)
            self._ip_in(SWITCH, "link", "add", "bridge", "type", "bridge")
            self._ip_in(SWITCH, "address", "add", f"{SWITCH_ADDRESS}/24", "dev", "bridge")
            self._ip_in(SWITCH, "link", "set", "bridge", "up")
            for host in self.hosts:
                self._make(host)
                self._plug_in(host)
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def address(self, host: str) -> str:
        """Return the IP address of a host."""
        return SWITCH_ADDRESS if host == SWITCH else f"{_NETWORK}.{11 + self.hosts.index(host)}"

    def namespace(self, host: str) -> str:
        """Return the name of a host's network namespace."""
        return self._prefix + host

    def inside(self, host: str) -> tuple[str, ...]:
        """Return the words to write before a command, so that it runs on a host.

        The command gets the process id of the prefix.
        """
        return ("ip", "netns", "exec", self.namespace(host))

    def move_to(self, host: str) -> None:
        """Move the calling thread to a host. Threads and processes that it starts later are there too."""
        enter(self.namespace(host))

    def apply(self, wanted: Condition) -> None:
        """Change the network to the wanted condition. TCP connections survive, unless an impairment lasts too long."""
        now, self._condition = self._condition, wanted
        for host in (SWITCH, *self.hosts):
            hearing = wanted.hearing.get(host, {})
            if hearing != now.hearing.get(host, {}):
                by_address = {self.address(sender): heard for sender, heard in hearing.items()}
                nft(drop_rules(by_address), namespace=self.namespace(host))
        for host in sorted(wanted.unplugged ^ now.unplugged):
            self._ip_in(SWITCH, "link", "set", _port(host), "down" if host in wanted.unplugged else "up")
        for host in self.hosts:
            if wanted.rates.get(host) != now.rates.get(host):
                self._set_rate(host, wanted.rates.get(host))

    def _set_rate(self, host: str, bits_per_s: int | None) -> None:
        for namespace, device in ((self.namespace(SWITCH), _port(host)), (self.namespace(host), "eth0")):
            if bits_per_s is None:
                tc("qdisc", "del", "dev", device, "root", namespace=namespace)
            else:
                rate = ("rate", f"{bits_per_s}bit")
                tc("qdisc", "replace", "dev", device, "root", "tbf", *rate, *_QUEUE, namespace=namespace)

    def _make(self, host: str) -> None:
        name = self.namespace(host)
        self._on_made(name)
        ip("netns", "add", name)
        self._open.callback(ip, "netns", "del", name)
        self._ip_in(host, "link", "set", "lo", "up")

    def _plug_in(self, host: str) -> None:
        end = ("type", "veth", "peer", "name", "eth0", "netns", self.namespace(host))
        self._ip_in(SWITCH, "link", "add", _port(host), *end)
        self._ip_in(SWITCH, "link", "set", _port(host), "master", "bridge", "up")
        self._ip_in(host, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._ip_in(host, "link", "set", "eth0", "up")

    def _ip_in(self, host: str, *words: str) -> None:
        ip(*words, namespace=self.namespace(host))


def _port(host: str) -> str:
    return f"to-{host}"
