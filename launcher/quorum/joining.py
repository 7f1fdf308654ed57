"""The way from `elastrain run --join` to a running node: the secret, the run's folder, the quorum, the agent."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from elastrain.errors import ConfigError
from elastrain.launcher.agent.guardian import Guardian
from elastrain.launcher.quorum.candidates import Candidates
from elastrain.launcher.quorum.certificates import Pair, make_pair
from elastrain.launcher.quorum.etcd_admin import EtcdAdmin
from elastrain.launcher.quorum.etcd_process import EtcdProcess, Ports
from elastrain.launcher.quorum.founding_round import FoundingRounds
from elastrain.launcher.quorum.join_hosts import DEFAULT_PORT, JoinHosts, look_up
from elastrain.launcher.quorum.keeper import Keeper
from elastrain.launcher.quorum.muster import Muster, listen
from elastrain.launcher.quorum.node_standing import Identity, NodeStanding
from elastrain.launcher.quorum.staying import stay_for_others
from elastrain.launcher.shared import process_environment, rundir
from elastrain.launcher.shared.console import say
from elastrain.launcher.shared.job_values import End
from elastrain.launcher.shared.rundir import EventLog, RunDir
from elastrain.launcher.start.registration import read_secret
from elastrain.launcher.start.run_options import NodeOptions, RunOptions
from elastrain.launcher.start.starting import count, etcd_store, run_node
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.sealed import SealedStore

SECRET_S = 5.0
"""Seconds to wait for the secret file, which the first host of --join makes in a folder that all share."""
ROOM_BYTES = 160 << 20
"""Room that etcd needs at its start: it reserves two files of 64 MiB."""
_FOLDER = "quorum"


@dataclass(frozen=True, kw_only=True)
class JoinWish:
    """The user's options for the quorum. `address`: this node's own, or None."""

    hosts: str
    node: str
    address: str | None
    secret_file: Path
    port: int = DEFAULT_PORT
    """Port of hosts that are named without one."""
    is_candidate: bool = True
    """True if this node may become an etcd member after the founding."""


def run_joined(options: RunOptions, wish: JoinWish) -> End:
    """Run one node of a job whose agents form their own quorum. Raises ConfigError, StoreError."""
    join = look_up(wish.hosts, wish.address, wish.port, in_a_pod=process_environment.in_a_pod())
    secret = _secret(wish.secret_file, join)
    options = options.with_own_log_dir()
    with ExitStack() as stack:
        guardian = stack.enter_context(Guardian("QUORUM", process_environment.without("ELASTRAIN_")))
        run = rundir.create(options.output.run_dir, options.job, secret_file=wish.secret_file)
        guardian.remove(run.path / _FOLDER)
        stack.callback(_remove_if_empty, run.path)
        say(f"job {options.job}, node {wish.node}, {count(options.size.workers, 'worker')}; run folder {run.path}")
        host = wish.address or join.address()
        etcd = stack.enter_context(own_quorum(options, wish, join, run, secret))
        node = NodeOptions(name=wish.node, etcd=etcd, secret_file=wish.secret_file, host=host, has_own_store=True)
        return run_node(options, node, run)


@contextmanager
def own_quorum(
    options: RunOptions, wish: JoinWish, join: JoinHosts, run: RunDir, secret: bytes
) -> Iterator[EtcdConfig]:
    """Take part in the quorum inside a `with` block. Yields the way to it. Raises ConfigError."""
    host = wish.address or join.address()
    folder, pair = _folder(run, secret, host)
    ports = Ports(client=f"{host}:{join.port + 1}", peer=f"{host}:{join.port + 2}")
    place = join.place if join.place is not None else -1
    standing = NodeStanding(Identity(job=options.job, node=wish.node, place=place, ports=ports))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        for offset in (1, 2):  # etcd would find out much later that its ports are taken
            listen(host, join.port + offset).close()
        stack.callback(Muster(host, join.port, pair, standing.greet).close)
        etcd = EtcdProcess(folder, pair, ports)
        config = EtcdConfig(
            endpoints=(ports.client,), ca=pair.ca, cert=pair.cert, key=pair.key, current=standing.endpoints
        )
        candidates = Candidates(
            SealedStore(etcd_store(config), secret),
            options.job,
            is_named=standing.identity.is_named,
            may_come=wish.is_candidate,
        )
        needs_all = options.size.nodes_min >= len(join.hosts)
        founding = FoundingRounds(standing, join, etcd, pair, needs_all=needs_all)
        keeper = Keeper(standing, founding, etcd, EtcdAdmin(pair), candidates)
        keeper.tell = told = _Teller(run, wish.node)
        stack.callback(told.close)
        stack.callback(keeper.close)
        keeper.start()
        if not keeper.wait_ready(options.waits.join_timeout_s):
            raise ConfigError(f"no quorum within {options.waits.join_timeout_s:g} s: {founding.trouble()}")
        yield config
        if options.are_ranks_adopted:
            with closing(SealedStore(etcd_store(config), secret)) as store:
                stay_for_others(store, JobKeys(store, options.job), wish.node, lambda: etcd.is_started)


class _Teller:
    """Writes what happens to the quorum into the event log, and its size on the screen. Repetitions are left out.

    The log is opened when there is something to write: a node that is refused leaves no file behind.
    """

    def __init__(self, run: RunDir, node: str) -> None:
        self._run, self._node, self._last = run, node, ("", "")
        self._log: EventLog | None = None

    def __call__(self, kind: str, sentence: str) -> None:
        if (kind, sentence) == self._last:
            return
        self._last = (kind, sentence)
        self._log = self._log or EventLog(self._run.events, f"quorum:{self._node}")
        self._log.write(kind, reason=sentence)
        if kind != "quorum_silent":
            say(f"{self._node}: {sentence}")

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def _remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run that has not begun."""
    with suppress(OSError):
        folder.rmdir()


def _folder(run: RunDir, secret: bytes, host: str) -> tuple[Path, Pair]:
    folder = run.path / _FOLDER
    try:
        free = os.statvfs(run.path)
        room = free.f_bavail * free.f_frsize
        if room < ROOM_BYTES:
            raise ConfigError(
                f"the disk of the run's folder {run.path} has {room >> 20} MiB left, and etcd needs "
                f"{ROOM_BYTES >> 20} MiB: make room, or name another folder by --run-dir"
            )
        folder.mkdir(mode=0o700)
        return folder, make_pair(folder, secret, host)
    except OSError as error:
        raise ConfigError(f"the folder {folder} of the quorum cannot be made: {error}") from None


def _secret(file: Path, join: JoinHosts) -> bytes:
    """Return the job's secret. The first host of --join makes it. Raises ConfigError."""
    until_s = time.monotonic() + SECRET_S
    while not file.exists():
        if join.place == 0:
            try:
                file.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
                rundir.make_secret(file)
                say(f"the job's secret is in {file}: every other node needs a copy (mode 0600)")
            except FileExistsError:
                pass  # another process was faster
            except OSError as error:
                raise ConfigError(f"the secret file {file} cannot be made: {error}") from None
        elif time.monotonic() >= until_s:
            raise ConfigError(
                f"this node has no secret file {file}: copy that of {join.hosts[0].name} (mode 0600), or name it by "
                "--secret-file"
            )
        else:
            time.sleep(0.1)
    return read_secret(file)
