"""One host's node of a job whose ranks another launcher has started on several hosts.

The hosts form their own quorum, as with `elastrain run --join`. They name its first hosts by the launcher's variables,
and have a port of the world's own.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from elastrain.base.environment import port_range
from elastrain.base.foreign_world import MEET_TIMEOUT_S, RanksHere, secret_file
from elastrain.base.world_variables import PORTS, WorldHosts
from elastrain.errors import ConfigError, ElastrainError
from elastrain.launcher.agent.adopted import AdoptedRanks, Rank
from elastrain.launcher.agent.worker_start import WorkerWish
from elastrain.launcher.schedulers.job_place import node_address
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.job_values import End
from elastrain.launcher.shared.process_environment import missing_extra
from elastrain.launcher.start.run_options import JobSize, OutputPlan, RunOptions, Waits
from elastrain.launcher.start.starting import address_towards

PARK_S = 300.0
"""Seconds for which a change of the view waits for the quorum or for silent hosts. No other host can come instead."""
PORTS_FREE_S = 15.0
"""Seconds for which an earlier job of the same world may still leave its ports."""
_LOOK_S = 0.2
_FAR_AWAY = "192.0.2.1:9"
"""An address that no host has (RFC 5737). The way to it leads through the network."""


def run_adopted_node(ranks: AdoptedRanks, in_order: Sequence[Rank], here: RanksHere, hosts: WorldHosts) -> End:
    """Run this host's node of the job until it ends. Raises ConfigError, StoreError."""
    try:
        from elastrain.launcher.quorum.joining import JoinWish, run_joined
    except ModuleNotFoundError as error:
        raise missing_extra("a world of ranks on several hosts", "embedded", error) from None
    ports = _ports()
    port = hosts.port if ports is None else ports[0]
    named, address = _addresses(hosts, port)
    folder = rundir.runs_folder() / f"{hosts.job}-node{hosts.node}-{secrets.token_hex(2)}"
    options = RunOptions(
        job=hosts.job,
        script=ranks,
        target=f"{here.size} ranks",
        size=JobSize(workers=here.count, nodes_min=hosts.nodes, nodes_max=hosts.nodes, max_restarts=0),
        output=OutputPlan(run_dir=folder),
        wish=WorkerWish(ports=None if ports is None else (ports[0] + PORTS, ports[1])),
        waits=Waits(join_timeout_s=MEET_TIMEOUT_S, park_timeout_s=PARK_S),
        began_s=time.monotonic(),
    )
    wish = JoinWish(
        hosts=_joined(named, port),
        node=f"node{hosts.node}",
        address=address,
        secret_file=secret_file(),
        # Of two etcd members none could be lost. The first host's one survives the loss of the other host.
        is_candidate=hosts.nodes > 2 or hosts.node == 0,
    )
    with _ended_with(in_order, ranks):
        _wait_for_ports(address, port)
        try:
            return run_joined(options, wish)
        except ElastrainError as error:
            raise ConfigError(f"the hosts of this world do not form a job by --join {wish.hosts}: {error}") from None


def _ports() -> tuple[int, int] | None:
    try:
        return port_range()
    except ValueError:
        raise ConfigError("ELASTRAIN_PORT_RANGE must be A-B, such as 30000-30999") from None


def _addresses(hosts: WorldHosts, port: int) -> tuple[list[str], str]:
    """Return the addresses of the quorum's first hosts, and this host's own. Raises ConfigError."""
    from elastrain.launcher.quorum.join_hosts import look_up

    own = node_address(hosts.own_name) if hosts.own_name else None
    named = [(node_address(host) or host) if hosts.own_name else host for host in hosts.hosts]
    join = look_up(_joined(named, port), own)
    first = hosts.hosts[0]
    if join.place == 0 and hosts.node != 0:
        raise ConfigError(
            f"hosts 0 and {hosts.node} of this world are one, {first}: let the launcher start all of their ranks as one"
        )
    if hosts.node == 0 and join.place != 0:
        raise ConfigError(
            f"the first host of this world is {first}, and rank 0 is on another one: set MASTER_ADDR to it"
        )
    found = [host.address for host in join.hosts]
    if hosts.node == 0 and own is None and found[0].startswith("127."):
        found[0] = own = _address_in_network(first)
    return found, own or join.address()


def _joined(hosts: Sequence[str], port: int) -> str:
    """Return the value of --join for these hosts."""
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


def _address_in_network(name: str) -> str:
    try:
        return address_towards(_FAR_AWAY)
    except ConfigError:
        raise ConfigError(
            f"{name} is a loopback address on the host of rank 0: set MASTER_ADDR to an address that the other hosts "
            "reach (torchrun --master-addr, or --local-addr)"
        ) from None


def _wait_for_ports(address: str, port: int) -> None:
    """Wait until the quorum's ports are free. Raises ConfigError if another program keeps one of them."""
    from elastrain.launcher.quorum.muster import listen

    until_s = time.monotonic() + PORTS_FREE_S
    while True:
        try:
            for each in range(port, port + PORTS):
                listen(address, each).close()
            return
        except ConfigError:
            if time.monotonic() >= until_s:
                raise
        time.sleep(_LOOK_S)


@contextmanager
def _ended_with(in_order: Sequence[Rank], ranks: AdoptedRanks) -> Iterator[None]:
    """Raise ConfigError in the main thread if a rank ends while the other hosts are awaited."""
    watched = {os.dup(rank.pidfd): rank.number for rank in in_order}
    is_over = threading.Event()
    gone: list[int] = []

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if ranks.wait and not is_over.is_set():
            is_over.set()
            raise ConfigError(f"rank {gone[0]} has ended before the ranks on the other hosts came")

    def watch() -> None:
        ended = select.poll()
        for pidfd in watched:
            ended.register(pidfd, select.POLLIN)
        while ranks.wait and not is_over.is_set():
            if found := ended.poll(_LOOK_S * 1000):
                gone.append(watched[found[0][0]])
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                return

    former = signal.signal(signal.SIGUSR1, on_signal)
    thread = threading.Thread(target=watch, name="elastrain-early-ends", daemon=True)
    try:
        thread.start()  # inside, because a rank may have ended already
        yield
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGUSR1, former)
        for pidfd in watched:
            with suppress(OSError):
                os.close(pidfd)
