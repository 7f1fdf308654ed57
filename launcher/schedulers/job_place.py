"""The place of a job under Slurm: the hosts of its quorum, its port and its size, in a file of the job's folder.

The batch script runs `python -m elastrain.launcher.schedulers.job_place` before the tasks start.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.core.quorum.founding import MEMBERS_MAX
from elastrain.launcher.quorum.join_hosts import PORTS
from elastrain.launcher.shared import process_environment
from elastrain.launcher.shared.rundir import make_secret

_FILE = "job.json"
_ASK_S = 10.0
_FIRST_PORT, _JOBS = 20000, 3000
"""Ports of quorums, below the kernel's own choice of ports. Slurm jobs whose numbers are close have different ones."""


@dataclass(frozen=True, kw_only=True)
class JobPlace:
    """The quorum's hosts (node -> address) and their port, and the numbers of nodes: a node finds its job by these."""

    hosts: dict[str, str]
    port: int
    nnodes: str
    spares: int

    def join(self, *, with_port: bool) -> str:
        """Return the value of --join. Without the port, it is the first one of --port-range."""
        return ",".join(f"{host}:{self.port}" if with_port else host for host in self.hosts.values())


def place_in(folder: Path) -> JobPlace | None:
    """Return the place of the job in this folder, or None if there is none. Raises ConfigError."""
    try:
        told = json.loads((folder / _FILE).read_text())
        hosts = {str(node): str(address) for node, address in told["hosts"].items()}
        return JobPlace(hosts=hosts, port=int(told["port"]), nnodes=str(told["nnodes"]), spares=int(told["spares"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / _FILE} does not say where the job's hosts are: {error}") from None


def port_of(number: int) -> int:
    """Return the first of the ports of the quorum of the Slurm job with this number."""
    return _FIRST_PORT + PORTS * (number % _JOBS)


def main() -> None:
    """Write the file, and make the secret unless there is one."""
    parser = argparse.ArgumentParser()
    for option in ("--folder", "--nnodes", "--spares"):
        parser.add_argument(option, required=True)
    asked = parser.parse_args()
    folder = Path(asked.folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):  # a requeued job keeps its secret
        make_secret(folder / "secret")
    try:
        hosts = {node: _address(node) for node in _first_nodes()}
    except ConfigError as error:
        sys.exit(f"elastrain: {error}")
    number = int(process_environment.inherited("SLURM_JOB_ID", "0"))
    place = JobPlace(hosts=hosts, port=port_of(number), nnodes=asked.nnodes, spares=int(asked.spares))
    written = folder / f".{_FILE}"
    written.write_text(json.dumps(asdict(place)))
    written.rename(folder / _FILE)


def _first_nodes() -> list[str]:
    """Return the first nodes of the allocation, as many as a quorum has members. Raises ConfigError."""
    listed = process_environment.inherited("SLURM_JOB_NODELIST")
    nodes = _told("scontrol", "show", "hostnames", listed) if listed else []
    if not nodes:
        raise ConfigError(f"Slurm does not name the nodes of this job (SLURM_JOB_NODELIST is {listed!r})")
    return nodes[:MEMBERS_MAX]


def node_address(node: str) -> str | None:
    """Return a node's address as Slurm knows it, else that of its name. None if neither can be resolved."""
    words = _told("scontrol", "show", "node", node, "--oneliner")
    name = next((word.partition("=")[2] for word in words if word.startswith("NodeAddr=")), node)
    with suppress(OSError):
        return socket.gethostbyname(name)
    return None


def _address(node: str) -> str:
    """Return a node's address. Raises ConfigError."""
    if (found := node_address(node)) is None:
        raise ConfigError(f"the address of node {node} cannot be resolved: set NodeAddr in Slurm, or its name in DNS")
    return found


def _told(*command: str) -> list[str]:
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=_ASK_S, check=True).stdout.split()
    return []


if __name__ == "__main__":
    main()
