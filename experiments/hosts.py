"""Hosts made of network namespaces: each has an address and a cable to the one switch; processes see no other network.

The switch is a bridge in a namespace of its own, where the etcd of all runs too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from elastrain.launcher.embedded import find_program

_NETWORK = "10.77.0"
ETCD = f"{_NETWORK}.1:2379"


def impossible() -> str | None:
    """Why there can be no such hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    name = f"elastrain-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return None


class Switch:
    """Hosts by name, plugged in, and an etcd at ETCD. Everything is gone when the block is left."""

    def __init__(self, folder: Path, hosts: Sequence[str]) -> None:
        self._folder = folder
        self._hosts = tuple(hosts)
        self._open = ExitStack()
        self._prefix = f"elastrain-{os.getpid()}-"

    def __enter__(self) -> Switch:
        try:
            self._make("switch")
            self._ip_in("switch", "link", "add", "bridge", "type", "bridge")
            self._ip_in("switch", "address", "add", f"{_NETWORK}.1/24", "dev", "bridge")
            self._ip_in("switch", "link", "set", "bridge", "up")
            for host in self._hosts:
                self._make(host)
                self._plug_in(host)
            self._start_etcd()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def address(self, host: str) -> str:
        return f"{_NETWORK}.{11 + self._hosts.index(host)}"

    def inside(self, host: str) -> tuple[str, ...]:
        """What to write before a command that is to run there; it becomes that command, with the same process id."""
        return ("ip", "netns", "exec", self._prefix + host)

    def cut(self, host: str) -> None:
        """Its cable: nothing arrives any more, in neither direction, and nobody is told."""
        self._ip_in("switch", "link", "set", _port(host), "nomaster")

    def mend(self, host: str) -> None:
        """Its cable carries again; connections that have lived so long go on where they were."""
        self._ip_in("switch", "link", "set", _port(host), "master", "bridge")

    def connections(self, pid: int) -> set[tuple[str, str]]:
        """Of the host on which the process runs: (own address, peer's address) of every open TCP connection."""
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        ends = [line.split()[1:4] for line in lines]
        return {(_dotted(own), _dotted(peer)) for own, peer, state in ends if state == "01"}

    def _make(self, host: str) -> None:
        _ip("netns", "add", self._prefix + host)
        self._open.callback(_ip, "netns", "del", self._prefix + host)
        self._ip_in(host, "link", "set", "lo", "up")

    def _plug_in(self, host: str) -> None:
        self._ip_in(
            "switch", "link", "add", _port(host), "type", "veth", "peer", "name", "eth0", "netns", self._prefix + host
        )
        self._ip_in("switch", "link", "set", _port(host), "master", "bridge", "up")
        self._ip_in(host, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
        self._ip_in(host, "link", "set", "eth0", "up")

    def _start_etcd(self) -> None:
        url, data = f"http://{ETCD}", str(self._folder / "etcd")
        options = ["--listen-client-urls", url, "--advertise-client-urls", url, "--data-dir", data, "--unsafe-no-fsync"]
        with (self._folder / "etcd.log").open("wb") as log:
            process = subprocess.Popen(
                [*self.inside("switch"), find_program(), *options, "--log-level", "error"], stdout=log, stderr=log
            )
        self._open.callback(process.wait)
        self._open.callback(process.kill)

    def _ip_in(self, host: str, *words: str) -> None:
        _ip("-n", self._prefix + host, *words)


def _port(host: str) -> str:
    return f"to-{host}"


def _dotted(end: str) -> str:
    """The address in `0B004D0A:1F90`, the kernel's way to write 10.77.0.11:8080."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(end.partition(":")[0])))


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
