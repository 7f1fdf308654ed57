"""The way of a rank that another launcher has started into the job of its world.

On each host, the first rank starts the process that runs the job, or the host's node of it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from socket import AF_UNIX, SOCK_STREAM, socket

import torch

from elastrain.base import environment
from elastrain.base.foreign_world import MEET_TIMEOUT_S, RanksHere, hear, tell
from elastrain.comm.wire.acceptor import same_user
from elastrain.errors import ConfigError

_LOOK_S = 0.05
_REPLY_S = 30.0
"""Seconds that the answer may take beyond the waits for the last rank."""
_WAITS_OF_HOSTS = 3
"""Number of waits where there are several hosts: for the ranks here, for the quorum, and for the other hosts."""
_started: list[subprocess.Popen[bytes]] = []
"""The process that the first rank has started, which outlives it."""


def join(here: RanksHere, rank: int, timeout_s: float = MEET_TIMEOUT_S) -> None:
    """Become a worker of the world's job. Raises ConfigError if not all of its ranks come in time."""
    if rank == here.first:
        command = [sys.executable, "-P", "-m", "elastrain.launcher.start.adoption", here.as_text()]
        # In a session of its own, because launchers kill the group of a rank that has ended.
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
    waits = 1 if here.hosts is None else _WAITS_OF_HOSTS
    with _reached(here, rank, time.monotonic() + timeout_s) as sock:
        try:
            tell(sock, {"rank": rank, "size": here.size})
            sock.settimeout(waits * timeout_s + _REPLY_S)
            answer = hear(sock)
        except OSError as error:
            raise ConfigError(f"the process that was to run the job of {here.size} ranks has ended: {error}") from None
    if (reason := answer.get("refused")) is not None:
        raise ConfigError(str(reason))
    environment.adopt({str(name): str(value) for name, value in answer["worker"].items()})
    if not environment.threads_are_told():
        torch.set_num_threads(1)  # as workers of `elastrain run` have


def _reached(here: RanksHere, rank: int, deadline_s: float) -> socket:
    while True:
        sock = socket(AF_UNIX, SOCK_STREAM)
        try:
            sock.connect("\0" + here.address)
            if same_user(sock):
                return sock
        except OSError:
            pass
        sock.close()
        if time.monotonic() >= deadline_s or any(each.poll() is not None for each in _started):
            raise ConfigError(
                f"rank {rank} of {here.size} has not met the others on this host: rank {here.first} calls "
                f"elastrain.init() within {MEET_TIMEOUT_S:.0f} s of it, or start the script by `elastrain run "
                f"--nproc-per-node {here.count}`"
            )
        time.sleep(_LOOK_S)
