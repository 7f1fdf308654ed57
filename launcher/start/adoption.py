"""The process that runs the job of a world of ranks that another launcher has started on one host.

Rank 0 starts it: `python -m elastrain.launcher.start.adoption ADDRESS SIZE`. It waits for all ranks, and then is the
agent of a job of one node with them as its workers. It ends with the last of them.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import uuid
from contextlib import ExitStack, suppress
from dataclasses import replace

from elastrain.base.foreign_world import MEET_TIMEOUT_S, hear, tell
from elastrain.errors import ConfigError
from elastrain.launcher.agent.adopted import AdoptedRanks, Rank
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.agent.worker_start import Script
from elastrain.launcher.nodes.door import listen_abstract
from elastrain.launcher.shared import process_environment, rundir
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.job_values import End
from elastrain.launcher.shared.line_socket import peer
from elastrain.launcher.shared.screen import keep_in, shared
from elastrain.launcher.start.run_options import JobSize, RunOptions
from elastrain.launcher.start.starting import agent_config, report

_HEAR_TIMEOUT_S = 5.0
"""Timeout for the first line of a rank, which it sends at once."""

_LATE_S = 5.0
"""Time without another rank after which the process of a job that was refused ends."""


class Meeting:
    """The ranks that have come so far. All of them are told why if not all can come."""

    def __init__(self, listener: socket.socket, size: int) -> None:
        self._listener, self._size = listener, size
        self.ranks: dict[int, Rank] = {}

    def wait(self, timeout_s: float) -> None:
        """Wait for all ranks. Raises ConfigError if one of them has ended, does not fit, or has not come in time."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.ranks) < self._size:
            waiting = select.poll()
            waiting.register(self._listener, select.POLLIN)
            for rank in self.ranks.values():
                waiting.register(rank.sock, select.POLLIN)
            ready = [fd for fd, _ in waiting.poll(max(0, round((deadline_s - time.monotonic()) * 1000)))]
            if gone := [rank.number for rank in self.ranks.values() if rank.sock.fileno() in ready]:
                raise ConfigError(f"rank {gone[0]} has ended before all {self._size} ranks called elastrain.init()")
            if self._listener.fileno() in ready:
                self._greet(self._listener.accept()[0])
            elif time.monotonic() >= deadline_s:
                raise ConfigError(self._missing(timeout_s))

    def refuse(self, reason: str) -> None:
        """Tell all ranks why there is no job, also those that come within the next seconds."""
        socks = [rank.sock for rank in self.ranks.values()]
        while True:
            for sock in socks:
                with suppress(OSError):
                    tell(sock, {"refused": reason})
            if not select.select([self._listener], [], [], _LATE_S)[0]:
                return
            socks = [self._listener.accept()[0]]

    def _greet(self, sock: socket.socket) -> None:
        """Take a rank in. Another user's process, and one that sends something else, is not heard."""
        pid, uid = peer(sock)
        sock.settimeout(_HEAR_TIMEOUT_S)
        try:
            if uid != os.geteuid():
                raise PermissionError(f"a process of user {uid} is not heard")
            came = hear(sock)
            number, size = int(came["rank"]), int(came["size"])
            rank = Rank(number=number, sock=sock, pid=pid, pidfd=os.pidfd_open(pid))
        except (OSError, LookupError, TypeError, ValueError):
            sock.close()
            return
        there = self.ranks.get(number)
        self.ranks[number if there is None else -1] = rank  # so that it is told as well
        if there is not None or not 0 <= number < self._size or size != self._size:
            raise ConfigError(
                f"rank {number} of a world of {size} has come to a job of {self._size} ranks"
                + (f", where process {there.pid} is rank {number} already" if there is not None else "")
                + ": give the ranks of each world a MASTER_PORT of their own, and each rank a number of its own"
            )

    def _missing(self, timeout_s: float) -> str:
        missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self.ranks)
        return (
            f"of {self._size} ranks, {missing} did not call elastrain.init() on this host within {timeout_s:.0f} s; "
            "ranks on several hosts are started by `elastrain run --nnodes N --rdzv-endpoint HOST:PORT` on each host"
        )


def main(address: str, size: int) -> int:
    """Run the job, and return its exit code."""
    listener = listen_abstract(address)
    meeting = Meeting(listener, size)
    try:
        meeting.wait(MEET_TIMEOUT_S)
        with shared():
            return report(_run(f"ranks-{uuid.uuid4().hex[:12]}", meeting))
    except ConfigError as error:
        meeting.refuse(str(error))
        return 1


def _run(job: str, meeting: Meeting) -> End:
    from elastrain.launcher.agent.agent import Agent
    from elastrain.launcher.store.port import MemoryStore

    size = len(meeting.ranks)
    options = RunOptions(
        job=job,
        script=Script(command=""),
        target="",
        size=JobSize(workers=size, max_restarts=0),
        began_s=time.monotonic(),
    )
    with ExitStack() as stack:
        guardian = stack.enter_context(Guardian("AGENT", process_environment.without("ELASTRAIN_")))
        run = rundir.create(None, job)
        stack.callback(run.secret.unlink, missing_ok=True)
        guardian.remove(run.secret)
        keep_in(run.events)
        say(f"job {job}, the {size} ranks of another launcher; run folder {run.path}")
        ranks = AdoptedRanks([meeting.ranks[number] for number in range(size)])
        config = replace(agent_config(options, options.config(), run), source=ranks)
        return Agent(config, MemoryStore(), guardian).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
