"""The world of processes that another launcher (torchrun, mpirun, srun) has started, as its variables tell it.

Also holds the lines by which its ranks on one host meet the process that runs their job.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

from elastrain.base.doctor_wishes import BITS

_WORLDS = (
    ("torchrun, or a launcher like it,", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("mpirun", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
)
"""Launchers, and their variables for the size of the world, for the rank, and for the processes on this host."""
_NAMES = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
"""Variables that are equal in all ranks of a world, and differ between the worlds of a host."""
_LINE_BYTES_MAX = 1 << 16
MEET_TIMEOUT_S = 120.0
"""Seconds from the first rank of a world that enters the job to the last one."""


@dataclass(frozen=True, kw_only=True)
class ForeignWorld:
    """The processes that another launcher has started beside this one."""

    launcher: str
    variable: str
    """The variable that tells the size."""
    rank: int
    size: int
    per_node: int

    @property
    def address(self) -> str:
        """Abstract UNIX address, without the leading NUL, at which the ranks of this user meet on this host."""
        told = [f"{name}={os.environ[name]}" for name in _NAMES if name in os.environ]
        if not told:  # such as Hydra, which starts all ranks of a host itself
            told = [f"parent={os.getppid()}"]
        named = "\n".join([str(os.geteuid()), str(self.size), *told])
        return f"elastrain/ranks/{hashlib.sha256(named.encode()).hexdigest()[:32]}"


def foreign_world() -> ForeignWorld | None:
    """Return the world of several processes that another launcher says this process belongs to, or None.

    In processes that a worker has started, the variables are those of the worker.
    """
    if os.environ.get("ELASTRAIN_AGENT") or os.environ.get(BITS):
        return None
    worlds = [row for row in _WORLDS if _count(row[1]) > 1 and os.environ.get(row[2], "").isdecimal()]
    if not worlds:
        return None
    launcher, size, rank, _ = worlds[0]
    count = _count(size)
    # A script of a launcher may export RANK and WORLD_SIZE, and leave the rest to that launcher's variables.
    told = [_count(local) for _, other, _, local in worlds if _count(other) == count and _count(local)]
    each = min([*told[:1], count])
    return ForeignWorld(launcher=launcher, variable=size, rank=int(os.environ[rank]), size=count, per_node=each)


def _count(name: str) -> int:
    """Return the leading number of a variable, such as 4 of Slurm's "4(x2)", or 0."""
    digits = os.environ.get(name, "").partition("(")[0].partition(",")[0]
    return int(digits) if digits.isdecimal() else 0


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
