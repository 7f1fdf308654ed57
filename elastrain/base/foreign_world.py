"""The place of this process in a world that another launcher has started, and the file of the job's secret.

Also holds the lines by which the ranks on one host meet the process that runs their job.
"""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from elastrain.base.doctor_wishes import BITS
from elastrain.base.world_variables import ForeignWorld, WorldHosts, world_in

_LINE_BYTES_MAX = 1 << 16
MEET_TIMEOUT_S = 120.0
"""Seconds from the first rank of a world that enters the job to the last one."""


@dataclass(frozen=True, kw_only=True)
class RanksHere:
    """The ranks of a world on this host, which form one node of its job."""

    address: str
    """Abstract UNIX address at which they meet."""
    first: int
    count: int
    size: int
    """Number of all ranks."""
    hosts: WorldHosts | None = None
    """The hosts of the world, or None if all ranks are on this one."""

    @property
    def numbers(self) -> range:
        """The ranks."""
        return range(self.first, self.first + self.count)

    def as_text(self) -> str:
        """Return the text from which `ranks_here` reads this value."""
        return json.dumps(asdict(self))


def ranks_here(text: str) -> RanksHere:
    """Return the value of this text."""
    told = json.loads(text)
    hosts = told.pop("hosts")
    if hosts is not None:
        hosts = WorldHosts(**{**hosts, "hosts": tuple(hosts["hosts"])})
    return RanksHere(**told, hosts=hosts)


def foreign_world() -> ForeignWorld | None:
    """Return the world of several processes that another launcher says this process belongs to, or None.

    In processes that a worker has started, the variables are those of the worker.
    """
    if os.environ.get("ELASTRAIN_AGENT") or os.environ.get(BITS):
        return None
    return world_in(os.environ)


def place_in(world: ForeignWorld, hosts: WorldHosts | None) -> RanksHere:
    """Return the ranks on this host, this process among them."""
    address = world.address(os.geteuid(), os.getppid())
    return RanksHere(address=address, first=world.first_rank, count=world.per_node, size=world.size, hosts=hosts)


def secret_file() -> Path:
    """Return the file with the secret of a job on several hosts, which every host must have."""
    home = os.environ.get("ELASTRAIN_HOME") or Path.home() / ".local/state/elastrain"
    return Path(os.environ.get("ELASTRAIN_SECRET_FILE") or Path(home) / "secret").absolute()


def tell(sock: socket.socket, message: dict[str, Any]) -> None:
    """Send a message as a line. Raises OSError."""
    sock.sendall(json.dumps(message).encode() + b"\n")


def hear(sock: socket.socket) -> dict[str, Any]:
    """Return the next message. Raises OSError, also if the other end is gone or has sent something else."""
    line = b""
    while not line.endswith(b"\n"):
        if not (more := sock.recv(_LINE_BYTES_MAX)) or len(line) > _LINE_BYTES_MAX:
            raise ConnectionError("the other process has ended")
        line += more
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConnectionError(f"the other process sent no message ({error})") from None
    if not isinstance(message, dict):
        raise ConnectionError("the other process sent no message")
    return message
