"""The way of a rank that another launcher has started into the job of its world, whose process rank 0 starts."""

from __future__ import annotations

import subprocess
import sys
import time
from socket import AF_UNIX, SOCK_STREAM, socket

import torch

from elastrain.base import environment
from elastrain.base.foreign_world import MEET_TIMEOUT_S, ForeignWorld, hear, tell
from elastrain.comm.wire.acceptor import same_user
from elastrain.errors import ConfigError

_LOOK_S = 0.05
_REPLY_S = 30.0
"""Seconds that the answer may take beyond the wait for the last rank."""
_started: list[subprocess.Popen[bytes]] = []
"""The process that rank 0 has started, which outlives it."""


def join(world: ForeignWorld, timeout_s: float = MEET_TIMEOUT_S) -> None:
    """Become a worker of the world's job. Raises ConfigError if not all of its ranks come to this host in time."""
    if world.rank == 0:
        command = [sys.executable, "-P", "-m", "elastrain.launcher.start.adoption", world.address, str(world.size)]
        # In a session of its own, because launchers kill the group of a rank that has ended.
        _started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True))
    with _reached(world, time.monotonic() + timeout_s) as sock:
        try:
            tell(sock, {"rank": world.rank, "size": world.size})
            sock.settimeout(timeout_s + _REPLY_S)
            answer = hear(sock)
        except OSError as error:
            raise ConfigError(f"the process that was to run the job of {world.size} ranks has ended: {error}") from None
    if (reason := answer.get("refused")) is not None:
        raise ConfigError(str(reason))
    environment.adopt({str(name): str(value) for name, value in answer["worker"].items()})
    if not environment.threads_are_told():
        torch.set_num_threads(1)  # as workers of `elastrain run` have


def _reached(world: ForeignWorld, deadline_s: float) -> socket:
    while True:
        sock = socket(AF_UNIX, SOCK_STREAM)
        try:
            sock.connect("\0" + world.address)
            if same_user(sock):
                return sock
        except OSError:
            pass
        sock.close()
        if time.monotonic() >= deadline_s or any(each.poll() is not None for each in _started):
            raise ConfigError(
                f"rank {world.rank} of {world.size} has not met the others on this host: rank 0 calls elastrain.init() "
                f"within {MEET_TIMEOUT_S:.0f} s of it, or start the script by `elastrain run --nproc-per-node "
                f"{world.per_node}`"
            )
        time.sleep(_LOOK_S)
