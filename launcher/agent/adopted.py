"""Workers that another launcher has started. The agent takes them over and watches them, and replaces none."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from elastrain.base.foreign_world import tell
from elastrain.launcher.agent.worker_start import Logs, WorkerEnvironment, environment
from elastrain.launcher.core.failures import UNKNOWN_EXIT
from elastrain.launcher.shared.job_values import Start

_TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
"""Variables of torchrun that a rank gets. The others, such as MASTER_PORT, stay those of its launcher."""


class Process(Protocol):
    """A worker's process. `pidfd` is readable once it has ended; `session` is to be killed if the agent is."""

    pid: int
    pidfd: int
    session: int | None

    @property
    def is_standby(self) -> bool:
        """True if the process waited for its place (`--standby`)."""

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker and the processes that belong to it."""

    def reap(self) -> int:
        """Return the exit code (< 0: minus the signal). Call this after `pidfd` is readable."""

    def close(self) -> None:
        """Release what is left."""


class WorkerSource(Protocol):
    """The place where workers come from: a script to start, or ranks that are there."""

    def start(self, worker: Start, common: WorkerEnvironment, logs: Logs) -> Process:
        """Start a worker. Raises OSError if it cannot."""

    def refill(self) -> None:
        """Start what is to wait for the next loss, because no worker warms up now."""

    def close(self) -> None:
        """End processes that wait."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank that waits at the other end of a socket for its place in the job."""

    number: int
    sock: socket.socket
    pid: int
    pidfd: int


class AdoptedRanks:
    """The ranks of one world on this host in their order, each of which becomes the worker of one slot, once."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = dict(enumerate(ranks))
        self.count = len(ranks)

    @property
    def wait(self) -> bool:
        """True as long as no rank has become a worker."""
        return len(self._ranks) == self.count

    def start(self, worker: Start, common: WorkerEnvironment, logs: Logs) -> AdoptedProcess:
        """Tell a rank that it is this worker. Raises OSError if it is gone, or has become one before."""
        if (rank := self._ranks.pop(worker.slot, None)) is None:
            raise ProcessLookupError(
                f"the rank in slot {worker.slot} was started by another launcher, and only that can replace it"
            )
        told = environment(common, worker).items()
        tell(rank.sock, {"worker": {k: v for k, v in told if k.startswith("ELASTRAIN_") or k in _TOLD}})
        rank.sock.close()
        return AdoptedProcess(rank)

    def refill(self) -> None:
        """Do nothing: another launcher starts the ranks."""

    def close(self) -> None:
        """Do nothing: another launcher has started the ranks."""


class AdoptedProcess:
    """One worker that another launcher has started, and reaps."""

    is_standby = False
    session: int | None = None
    """The agent's end is seen by the worker itself: other processes may belong to its session."""

    def __init__(self, rank: Rank) -> None:
        self.pid, self.pidfd = rank.pid, rank.pidfd

    def signal_group(self, number: int) -> None:
        """Send a signal to the worker alone: its group may be that of all ranks, and of their launcher."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """Return the exit code, or UNKNOWN_EXIT if its launcher was faster in reaping the process."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        except OSError:
            fields = []
        os.close(self.pidfd)
        if not fields or fields[0] not in "ZX":
            return UNKNOWN_EXIT
        return os.waitstatus_to_exitcode(int(fields[49]))

    def close(self) -> None:
        """Do nothing: its output is its launcher's."""
