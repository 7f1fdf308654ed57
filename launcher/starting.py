"""From what the operator ordered to a running agent: alone, or as one node of several.

Puts parts together; nothing is decided about the job, and no option is parsed here.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from elastrain.errors import ConfigError
from elastrain.launcher import rundir
from elastrain.launcher.etcd_config import EtcdConfig
from elastrain.launcher.faults import Fault
from elastrain.launcher.guardian import Guardian
from elastrain.launcher.rundir import RunDir
from elastrain.launcher.say import say
from elastrain.launcher.values import End, JobConfig, JobTimes
from elastrain.launcher.worker_start import Logs, Script, import_torch

if TYPE_CHECKING:
    from elastrain.launcher.agent import AgentConfig
    from elastrain.launcher.etcd import EtcdStore

_GRPC_VERBOSITY = "GRPC_VERBOSITY"
KEY_TTL_S = 12 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Order:
    """What was asked for on the command line, checked."""

    job: str
    script: Script
    target: str
    """The script as it was named: what all nodes of a job have in common."""
    workers: int = 1
    nodes_min: int = 1
    nodes_max: int = 1
    max_restarts: int = 10
    run_dir: Path | None = None
    log_dir: Path | None = None
    redirects: Mapping[int, int] = field(default_factory=dict)
    tee: Mapping[int, int] = field(default_factory=dict)
    join_timeout_s: float = 120.0
    last_call_s: float = 5.0
    stop_grace_s: float = 5.0
    park_timeout_s: float = 3600.0
    key_ttl_s: float = KEY_TTL_S
    armed: bool = False
    faults: tuple[Fault, ...] = ()

    def config(self, **of_the_node: object) -> JobConfig:
        times = JobTimes(
            join_timeout_s=self.join_timeout_s, last_call_s=self.last_call_s, park_timeout_s=self.park_timeout_s
        )
        common = {"workers": self.workers, "max_restarts": self.max_restarts, "armed": self.armed, "times": times}
        return JobConfig(**{**common, **of_the_node})  # type: ignore[arg-type]

    def with_own_log_dir(self) -> Order:
        """As under torchrun, each run has a folder of its own in --log-dir, named after the job. Raises ConfigError."""
        if self.log_dir is None:
            return self
        try:
            self.log_dir.mkdir(parents=True, exist_ok=True)
            return replace(self, log_dir=Path(tempfile.mkdtemp(prefix=f"{self.job}_", dir=self.log_dir)))
        except OSError as error:
            raise ConfigError(f"no folder can be made in --log-dir {self.log_dir}: {error}") from None

    def logs(self, run: RunDir) -> Logs:
        return Logs(folder=(self.log_dir or run.logs).absolute(), redirects=self.redirects, tee=self.tee)


@dataclass(frozen=True, kw_only=True)
class NodeOrder:
    """What one node of several needs beside that. `host`: its address for others; None: all are on this machine."""

    name: str
    etcd: EtcdConfig
    secret_file: Path
    host: str | None


def run_alone(order: Order) -> End:
    """One node, a store in memory. Raises ConfigError."""
    from elastrain.launcher.agent import Agent
    from elastrain.launcher.store import MemoryStore

    order = order.with_own_log_dir()
    with Guardian("AGENT") as guardian:
        run = rundir.create(order.run_dir, order.job)
        guardian.remove(run.secret)
        say(f"job {order.job}, {count(order.workers, 'worker')}; run folder {run.path}")
        return Agent(_agent_config(order, order.config(), run), MemoryStore(), guardian, order.faults).run()


def run_node(order: Order, node: NodeOrder, run: RunDir | None = None) -> End:
    """One node of several. `run` is given where the nodes are simulated. Raises ConfigError, StoreError."""
    from elastrain.launcher.agent import Agent
    from elastrain.launcher.enrol import Terms, enter

    plain = _etcd_store(node.etcd)
    try:
        plain.check()
        import_torch()
        terms = Terms(nodes=f"{order.nodes_min}:{order.nodes_max}", script=order.target)
        place = enter(plain, order.job, node.name, terms, file=node.secret_file, key_ttl_s=order.key_ttl_s)
        if run is None:
            order = order.with_own_log_dir()
            run = rundir.create(order.run_dir, order.job, secret_file=node.secret_file)
            say(f"job {order.job}, node {node.name}, {count(order.workers, 'worker')}; run folder {run.path}")
        config = order.config(
            node=node.name, incarnation=place.incarnation, nodes_min=order.nodes_min, nodes_max=order.nodes_max
        )
    except BaseException:
        plain.close()
        raise
    with Guardian("AGENT") as guardian:
        return Agent(_agent_config(order, config, run, node), place.store, guardian, order.faults).run()


def _etcd_store(config: EtcdConfig) -> EtcdStore:
    """gRPC reads how much it may say when it is imported: what goes wrong is told in one sentence of ours."""
    told = _GRPC_VERBOSITY in os.environ
    os.environ.setdefault(_GRPC_VERBOSITY, "NONE")
    try:
        from elastrain.launcher.etcd import EtcdStore
    finally:
        if not told:
            del os.environ[_GRPC_VERBOSITY]  # the workers' scripts may use it, too
    return EtcdStore(config)


def _agent_config(order: Order, settings: JobConfig, run: RunDir, node: NodeOrder | None = None) -> AgentConfig:
    from elastrain.launcher.agent import AgentConfig

    host = node.host if node is not None else None
    return AgentConfig(
        job=order.job,
        settings=settings,
        run=run,
        script=order.script,
        logs=order.logs(run),
        host=host or "127.0.0.1",
        one_host=host is None,
        stop_grace_s=order.stop_grace_s,
        key_ttl_s=order.key_ttl_s,
    )


def address_towards(endpoint: str) -> str:
    """This machine's address on the way to HOST:PORT: where others on that way reach it. Raises ConfigError."""
    host, _, port = endpoint.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(address)  # sends nothing
            return str(sock.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"--rdzv-endpoint {endpoint}: there is no way to it from here ({error})") from None


def report(end: End) -> int:
    """The last words on the screen; the exit code."""
    say_last(end.sentence, end.detail)
    return end.code


def say_last(sentence: str, detail: str) -> None:
    """`detail`, a traceback, follows the sentence."""
    say(sentence + (f"\n{detail.rstrip()}" if detail else ""))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
