"""The process that runs the job of a world of ranks that another launcher has started, or one host's node of the job.

The first rank of a host starts it: `python -m elastrain.launcher.start.adoption RANKS`, with a text of `RanksHere`. It
waits for all ranks on this host, and then is the agent of a node with them as its workers. On one host this is the only
node, and the process ends with the last of its ranks.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from elastrain.base.foreign_world import MEET_TIMEOUT_S, RanksHere, hear, ranks_here, tell
from elastrain.base.world_variables import WorldHosts
from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.agent.adopted import AdoptedRanks, Rank
from elastrain.launcher.agent.guardian import Guardian
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
    """The ranks on this host that have come so far. All of them are told why if not all can come."""

    def __init__(self, listener: socket.socket, here: RanksHere) -> None:
        self._listener, self._here = listener, here
        self.ranks: dict[int, Rank] = {}

    def wait(self, timeout_s: float) -> None:
        """Wait for all ranks. Raises ConfigError if one of them has ended, does not fit, or has not come in time."""
        deadline_s = time.monotonic() + timeout_s
        while len(self.ranks) < self._here.count:
            waiting = select.poll()
            waiting.register(self._listener, select.POLLIN)
            for rank in self.ranks.values():
                waiting.register(rank.sock, select.POLLIN)
            ready = [fd for fd, _ in waiting.poll(max(0, round((deadline_s - time.monotonic()) * 1000)))]
            if gone := [rank.number for rank in self.ranks.values() if rank.sock.fileno() in ready]:
                raise ConfigError(
                    f"rank {gone[0]} has ended before all {self._here.count} ranks called elastrain.init()"
                )
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
        if there is not None or number not in self._here.numbers or size != self._here.size:
            raise ConfigError(self._misfit(number, size, there))

    def _misfit(self, number: int, size: int, there: Rank | None) -> str:
        here = self._here
        if here.hosts is not None and there is None and size == here.size:
            return (
                f"rank {number} is on the host of rank {here.first}, and the {here.count} ranks of a host must follow "
                "one another: deal them out host by host (srun --distribution=block, mpirun --map-by slot)"
            )
        return (
            f"rank {number} of a world of {size} has come to a job of {here.size} ranks"
            + (f", where process {there.pid} is rank {number} already" if there is not None else "")
            + ": give the ranks of each world a MASTER_PORT of their own, and each rank a number of its own"
        )

    def _missing(self, timeout_s: float) -> str:
        here = self._here
        missing = ", ".join(str(rank) for rank in here.numbers if rank not in self.ranks)
        advice = "; if they are on several hosts, LOCAL_WORLD_SIZE must tell the number of ranks on each"
        return (
            f"of {here.count} ranks, {missing} did not call elastrain.init() on this host within {timeout_s:.0f} s"
            + (advice if here.hosts is None else "")
        )


def main(here: RanksHere) -> int:
    """Run the job, or this host's node of it, and return its exit code."""
    meeting = Meeting(listen_abstract(here.address), here)
    try:
        meeting.wait(MEET_TIMEOUT_S)
        in_order = [meeting.ranks[number] for number in here.numbers]
        with shared():
            end = _run(in_order) if here.hosts is None else _run_node(in_order, here, here.hosts)
            code = report(end)
    except ElastrainError as error:
        meeting.refuse(str(error))
        return 1
    return code


def _run_node(in_order: Sequence[Rank], here: RanksHere, hosts: WorldHosts) -> End:
    from elastrain.launcher.start.adopted_node import run_adopted_node

    ranks = AdoptedRanks(in_order)
    end = run_adopted_node(ranks, in_order, here, hosts)
    if ranks.wait:  # the job has ended before it began
        say(end.sentence)
        raise ConfigError(end.sentence)
    return end


def _run(in_order: Sequence[Rank]) -> End:
    from elastrain.launcher.agent.agent import Agent
    from elastrain.launcher.store.port import MemoryStore

    job, size = f"ranks-{uuid.uuid4().hex[:12]}", len(in_order)
    options = RunOptions(
        job=job,
        script=AdoptedRanks(in_order),
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
        return Agent(agent_config(options, options.config(), run), MemoryStore(), guardian).run()


if __name__ == "__main__":
    sys.exit(main(ranks_here(sys.argv[1])))
