"""The place of this process in its job: rank, world size, member id, and turns. They are known from `init` on."""

from __future__ import annotations

import sys
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

import torch.distributed

from elastrain.base.environment import Environment, parent_worker, read_environment
from elastrain.base.foreign_world import foreign_world, place_in, secret_file
from elastrain.base.world_variables import ForeignWorld, WorldHosts, hosts_of
from elastrain.errors import ConfigError
from elastrain.job.world import View
from elastrain.runtime.io.rank_meeting import join
from elastrain.runtime.io.turns import MAIN_FIRST_TIMEOUT_S, Turns


def joined() -> Environment:
    """Return this process's environment. If another launcher has started it with others, they become one job first.

    Raises ConfigError if they have no common PYTHONHASHSEED, if their hosts have no secret or are not known, or if not
    all ranks come.
    """
    if (world := foreign_world()) is None:
        return read_environment()
    hosts = _hosts(world) if world.nodes > 1 else None
    if sys.flags.hash_randomization:  # which the job would find out, but only once all ranks have started
        raise ConfigError(
            f"{world.launcher} has started this process without PYTHONHASHSEED, so a set of words has another order in "
            "each rank: set PYTHONHASHSEED=0 in the environment of all ranks"
        )
    join(place_in(world, hosts), world.rank)
    return read_environment()


def _hosts(world: ForeignWorld) -> WorldHosts:
    """Return the hosts of a world on several hosts. Raises ConfigError."""
    found, file = hosts_of(world), secret_file()
    if isinstance(found, WorldHosts) and file.exists():
        return found
    reason = (
        found
        if isinstance(found, str)
        else f"this host has no secret file {file}, which all hosts need alike: make it on one host by `umask 077; "
        f"mkdir -p {file.parent}; head -c 32 /dev/urandom > {file}`, and copy it to the others, or let "
        "ELASTRAIN_SECRET_FILE name a file of mode 0600 that all hosts share"
    )
    raise ConfigError(
        f"{world.launcher} has started this process as rank {world.rank} of {world.size} on {world.nodes} hosts, and "
        f"{reason}; or start the script by `elastrain run --nproc-per-node {world.per_node} --nnodes {world.nodes} "
        f"--join {world.hosts[0] if world.hosts else 'HOST'}` on each host instead, with the same arguments, or with "
        f"{world.variable}=1 if each rank is meant to be a job of its own"
    )


def check_group(environment: Environment) -> None:
    """Raise ConfigError if this process without our launcher is in a process group of several ranks."""
    group = torch.distributed
    if environment.agent is not None or not group.is_available() or not group.is_initialized():
        return
    if (size := group.get_world_size()) > 1:
        raise ConfigError(
            f"this process is rank {group.get_rank()} of a process group of {size} ranks, and each of them would train "
            f"a job of its own: start the script by `elastrain run --nproc-per-node {size}` instead, without "
            "init_process_group"
        )


def check_process(environment: Environment, *, has_entered: bool) -> None:
    """Warn in a process that a worker has started. Raises ConfigError if this process cannot enter a job.

    `has_entered`: whether this process, or the one that it is a fork of, has entered a job.
    """
    parent = parent_worker()
    if parent is not None and has_entered:
        raise ConfigError(
            f"this process is a fork of {parent}, after elastrain.init(), and cannot have a job of its own: "
            "start it by subprocess, or by multiprocessing's 'spawn'"
        )
    check_group(environment)
    if environment.agent is not None and has_entered:
        raise ConfigError("elastrain.init() was called before: a worker has one job, which init() returned then")
    if parent is not None:
        warnings.warn(f"this process was started by {parent} and is a job of one beside it", stacklevel=3)


class Ranked(ABC):
    """The part of a job's interface that tells members apart. Before the first view, the launcher's word counts."""

    @property
    @abstractmethod
    def member(self) -> str:
        """Id of this member, such as "m0". A worker that replaces another one has an id of its own."""

    @property
    def rank(self) -> int:
        """Position of this member in the current view. Before its first view, the position that the launcher expects.

        A member that joins a running job is never 0 before it has joined.
        """
        view, expected = self._standing()
        return view.rank(self.member) if view else expected[0]

    @property
    def world_size(self) -> int:
        """Number of members in the current view. Before the first view, the number that the launcher expects."""
        view, expected = self._standing()
        return len(view.members) if view else expected[1]

    @property
    def is_main(self) -> bool:
        """True on rank 0. Another member becomes the main one if that is lost: ask again in each step."""
        return self.rank == 0

    def main_first(self, timeout: float = MAIN_FIRST_TIMEOUT_S) -> AbstractContextManager[None]:
        """Let the main member run the code inside first, such as a download into a cache, then the others.

        Where a job has several nodes, the member of lowest rank on each node goes first there, because nodes need not
        share a disk. All members call it alike, before the loop or between two steps. If the first one is lost inside,
        its successor goes first. An exception inside lets the others go on.

        Raises:
            ConfigError: `timeout` is no number of seconds above 0.
            TimeoutError: The first member has not left it within `timeout` seconds.
        """
        return self._turns().take(lambda: self._standing()[0], timeout)

    @abstractmethod
    def _turns(self) -> Turns:
        """Return the turns of this member. Raises ConfigError before it has entered the job."""

    @abstractmethod
    def _standing(self) -> tuple[View | None, tuple[int, int]]:
        """Return the current view if this member belongs to it, and the rank and world size that the launcher expects.

        The latter are those of the first view.
        """
