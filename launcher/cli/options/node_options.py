"""Options for the number of nodes and workers, and for how the nodes find each other."""

from __future__ import annotations

import fcntl
import re
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from elastrain.base.environment import AUTO
from elastrain.errors import ConfigError
from elastrain.launcher.cli.options.job_options import SECONDS_OF_A_YEAR
from elastrain.launcher.cli.options.torchrun import BACKEND, local_world_size
from elastrain.launcher.quorum.join_hosts import DEFAULT_PORT, ports_beside
from elastrain.launcher.shared import rundir
from elastrain.launcher.shared.places import QuarantineRule
from elastrain.launcher.start.run_options import JobSize, NodeOptions
from elastrain.launcher.start.starting import address_towards
from elastrain.launcher.store.etcd_config import EtcdConfig

_LOCAL_MAX = 64
_SIOCGIFADDR = 0x8915
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def stages_in(words: str | None) -> int | str | None:
    """Return what --stages asks for: a number of members, AUTO, or None. Raises ConfigError for other words."""
    if words is None or words == AUTO:
        return words
    if not words.isdecimal() or int(words) < 1:
        raise ConfigError(f"--stages {words!r}: write a number from 1 on, or {AUTO}")
    return int(words)


@dataclass(frozen=True, kw_only=True)
class SizeFlags:
    """Options for the number of nodes, workers and restarts."""

    heading: ClassVar = "Size"

    standalone: Annotated[bool, typer.Option("--standalone", help="One node, this machine; the default.")] = False
    nnodes: Annotated[
        str, typer.Option("--nnodes", help="Nodes, or MIN:MAX. Each node is started by a command of its own.")
    ] = "1"
    local_nodes: Annotated[
        int | None,
        typer.Option(
            "--local-nodes", min=1, max=_LOCAL_MAX, help="Simulate so many nodes here, with an etcd for them."
        ),
    ] = None
    netns: Annotated[
        bool,
        typer.Option(
            "--netns", help="Each simulated node in a network namespace of its own, all on a bridge; root only."
        ),
    ] = False
    nproc_per_node: Annotated[
        str, typer.Option("--nproc-per-node", "--nproc_per_node", help="Workers here: a number, cpu, gpu or auto.")
    ] = "1"
    spares: Annotated[
        int, typer.Option("--spares", min=0, max=9999, help="Nodes beyond MAX that wait to take a lost node's place.")
    ] = 0
    max_restarts: Annotated[
        int | None,
        typer.Option(
            "--max-restarts",
            "--max_restarts",
            min=0,
            help="Workers started again; one no longer counts an hour after it has come in. Without job.steps: times "
            "that all workers are started again. Default: 10, but errors before the first commit end the job.",
        ),
    ] = None
    quarantine: Annotated[
        str | None,
        typer.Option("--quarantine", help="N/TIME, such as 3/1h: a node that lost N workers in TIME gets no more."),
    ] = None
    standby: Annotated[
        bool, typer.Option("--standby", help="Keep a waiting worker, with its libraries imported, for a lost one.")
    ] = False
    stages: Annotated[
        str | None,
        typer.Option(
            "--stages",
            help="Members of a pipeline, each with some blocks of the model: a number, or auto for the fewest that "
            "have room in memory; default: 1.",
        ),
    ] = None

    standing_shadows: Annotated[
        bool,
        typer.Option(
            "--standing-shadows",
            help="With --stages: members with memory left keep blocks that only one other member computes, so that its "
            "loss moves no block.",
        ),
    ] = False

    def size(self, rendezvous: RendezvousFlags) -> JobSize:
        """Return the checked size of the job. Raises ConfigError."""
        local = self.local_nodes
        nodes_min, nodes_max = node_range(self.nnodes) if local is None else (local, local)
        self._check_together(rendezvous, nodes_max + self.spares)
        workers = local_world_size(self.nproc_per_node)
        return JobSize(
            workers=workers,
            nodes_min=nodes_min,
            nodes_max=nodes_max,
            spares=self.spares,
            max_restarts=self.max_restarts,
            quarantine=quarantine_rule(self.quarantine) if self.quarantine is not None else None,
            standby=self.standby,
        )

    def stages_of(self, size: JobSize) -> int | str | None:
        """Return the number of stages, or AUTO. Raises ConfigError if it exceeds the possible number of members."""
        stages, most = stages_in(self.stages), size.workers * size.nodes_max
        # If each node has a command of its own, other nodes may start more workers than this one.
        if isinstance(stages, int) and stages > most and (self.local_nodes is not None or size.nodes_max == 1):
            raise ConfigError(
                f"--stages {stages} asks for pipelines of {stages} members, and this job has {most}: start "
                "more workers (--nproc-per-node), or ask for fewer stages"
            )
        return stages

    def _check_together(self, rendezvous: RendezvousFlags, all_nodes: int) -> None:
        endpoint, job = rendezvous.rdzv_endpoint, rendezvous.rdzv_id
        if rendezvous.join is not None:
            self._check_join(rendezvous)
            return
        if self.local_nodes is not None and all_nodes > _LOCAL_MAX:
            raise ConfigError(
                f"--local-nodes {self.local_nodes} with --spares {self.spares}: at most {_LOCAL_MAX} nodes are "
                "simulated here"
            )
        if self.local_nodes is not None and (self.standalone or self.nnodes != "1" or endpoint is not None):
            raise ConfigError(
                "--local-nodes excludes --standalone, --nnodes and --rdzv-endpoint: the nodes are all here"
            )
        if self.netns and self.local_nodes is None:
            raise ConfigError("--netns is for simulated nodes: give --local-nodes N, too")
        if self.standalone and (all_nodes > 1 or endpoint is not None):
            raise ConfigError(
                "--standalone means one node, this machine: leave --nnodes, --spares and --rdzv-endpoint out"
            )
        if self.local_nodes is None and self.spares and (endpoint is None or job is None):
            raise ConfigError(
                f"--spares {self.spares} asks for nodes beyond MAX, and this job has one node: give --rdzv-endpoint "
                "HOST:PORT (an etcd) and --rdzv-id on each node, or simulate nodes here with --local-nodes"
            )
        if self.local_nodes is None and all_nodes > 1 and (endpoint is None or job is None):
            raise ConfigError(
                "several nodes find each other by --rdzv-endpoint HOST:PORT (an etcd) and --rdzv-id: give both on each "
                "node, or --join HOST[,HOST,HOST] and --rdzv-id without an etcd, or simulate nodes here with "
                "--local-nodes"
            )

    def _check_join(self, rendezvous: RendezvousFlags) -> None:
        if self.local_nodes is not None or self.standalone or rendezvous.rdzv_endpoint is not None:
            raise ConfigError(
                "--join excludes --local-nodes, --standalone and --rdzv-endpoint: the nodes run an etcd themselves"
            )
        if rendezvous.rdzv_id is None:
            raise ConfigError("--join needs --rdzv-id, the job's name: give the same one on each node")


@dataclass(frozen=True, kw_only=True)
class RendezvousFlags:
    """Options for the job's name, and for this node's way to the other nodes."""

    heading: ClassVar = "Nodes"

    rdzv_id: Annotated[
        str | None, typer.Option("--rdzv-id", "--rdzv_id", help="The job's name; default: made from the time.")
    ] = None
    rdzv_endpoint: Annotated[
        str | None, typer.Option("--rdzv-endpoint", "--rdzv_endpoint", help="The etcd of several nodes: HOST:PORT[,…].")
    ] = None
    join: Annotated[
        str | None,
        typer.Option(
            "--join",
            help="In place of --rdzv-endpoint: HOST[:PORT][,…], up to three nodes that run an etcd for the job.",
        ),
    ] = None
    rdzv_backend: Annotated[
        str, typer.Option("--rdzv-backend", "--rdzv_backend", help="How nodes find each other: etcd-v3 only.")
    ] = BACKEND
    node_name: Annotated[
        str | None, typer.Option("--node-name", help="This node's name in the job; default: the host's name.")
    ] = None
    local_addr: Annotated[
        str | None,
        typer.Option("--local-addr", "--local_addr", help="This node's address for the others; default: towards etcd."),
    ] = None
    interface: Annotated[
        str | None, typer.Option("--interface", help="In place of --local-addr: the network interface with it.")
    ] = None
    port_range: Annotated[
        str | None, typer.Option("--port-range", help="A-B: the ports at which this node listens; default: any free.")
    ] = None
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", help="The job's secret, mode 0600, the same on all nodes; made on first use."),
    ] = None

    share_compile_cache: Annotated[
        bool,
        typer.Option(
            "--share-compile-cache",
            help="Nodes that join take what torch.compile has built from another node. It is code; give the flag on "
            "each node. Default: each node compiles for itself.",
        ),
    ] = False

    def job(self) -> str:
        """Return the job's name, made from the time if none was given. Raises ConfigError."""
        job = self.rdzv_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        if not _NAME.fullmatch(job):
            raise ConfigError(f"--rdzv-id {job!r}: use up to 64 letters, digits, '.', '_' and '-'")
        return job

    def node(self, etcd: EtcdConfig) -> NodeOptions:
        """Return the options of this node among several. Raises ConfigError."""
        return NodeOptions(
            name=self.name(),
            etcd=etcd,
            secret_file=self.secret(),
            host=self.address() or address_towards(etcd.endpoints[0]),
        )

    def name(self) -> str:
        """Return this node's name in the job. Raises ConfigError."""
        return _node_name(self.node_name)

    def secret(self) -> Path:
        """Return the file of the job's secret."""
        return (self.secret_file or rundir.home() / "secret").absolute()

    def ports(self, size: JobSize, *, nodes_here: int) -> tuple[int, int] | None:
        """Return the first and the last port for agents and members, or None without --port-range.

        The ports of --join lie in the range, beside these. Raises ConfigError if too few are free.
        """
        if self.port_range is None:
            return None
        whole = port_range(self.port_range)
        first, last = ports_beside(self.join, whole) if self.join is not None else whole
        beside = " beside the three of --join" if self.join is not None else ""
        # The agent, the port for scripts, and each worker beside the one that it replaces.
        needed = nodes_here * (2 + 2 * size.workers) + (nodes_here > 1)
        free = free_ports(first, last, self.address() or "", at_most=needed)
        here = f"{needed} are needed here{beside}"
        if last - first + 1 < needed:
            raise ConfigError(f"--port-range {self.port_range}: {last - first + 1} ports, and {here}")
        if free < needed:
            raise ConfigError(f"--port-range {self.port_range}: {free} ports are free, and {here}")
        return first, last

    def join_port(self) -> int:
        """Return the port of hosts that --join names without one. Raises ConfigError."""
        return DEFAULT_PORT if self.port_range is None else port_range(self.port_range)[0]

    def address(self) -> str | None:
        """Return the address that the user has chosen, or None. Raises ConfigError."""
        if self.interface is not None and self.local_addr is not None:
            raise ConfigError("--interface and --local-addr both name this node's address: give one")
        return self.local_addr if self.interface is None else _address_of(self.interface)


def node_range(text: str, option: str = "--nnodes") -> tuple[int, int]:
    """Return the minimum and maximum of torchrun's --nnodes: N, or MIN:MAX. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    if not found:
        raise ConfigError(f"{option} {text!r}: write N, or MIN:MAX")
    least, most = int(found[1]), int(found[2] or found[1])
    if not 1 <= least <= most:
        raise ConfigError(f"{option} {text}: MIN must be 1 or more, and at most MAX")
    return least, most


def quarantine_rule(text: str) -> QuarantineRule:
    """Return the rule of --quarantine N/TIME. Raises ConfigError."""
    found = re.fullmatch(r"([1-9]\d{0,3})/(\d{1,7}(?:\.\d{1,3})?)([smhd]?)", text)
    within_s = float(found[2]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[3]] if found else 0.0
    if found is None or not 0 < within_s <= SECONDS_OF_A_YEAR:
        raise ConfigError(f"--quarantine {text!r}: write N/TIME with a time up to a year, such as 3/1h")
    return QuarantineRule(losses=int(found[1]), within_s=within_s)


def port_range(text: str) -> tuple[int, int]:
    """Return the first and the last port of --port-range. Raises ConfigError."""
    found = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    if found is None or not 1024 <= int(found[1]) <= int(found[2]) <= 65535:
        raise ConfigError(f"--port-range {text!r}: write A-B, such as 30000-30999, from 1024 to 65535")
    return int(found[1]), int(found[2])


def free_ports(first: int, last: int, host: str, *, at_most: int) -> int:
    """Return the number of free ports from `first` to `last` on this host, counted up to `at_most`."""
    free = 0
    for port in range(first, last + 1):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock, suppress(OSError):
            sock.bind((host, port))
            free += 1
        if free == at_most:
            break
    return free


def _address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises ConfigError."""
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise ConfigError(f"--interface {interface}: there is no such interface here; there are {', '.join(names)}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            raise ConfigError(f"--interface {interface} has no IPv4 address: name one by --local-addr") from None
    return socket.inet_ntoa(answer[20:24])


def _node_name(given: str | None) -> str:
    name = given or re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or "node"
    if not _NAME.fullmatch(name):
        raise ConfigError(f"--node-name {name!r}: use up to 64 letters, digits, '.', '_' and '-'")
    return name
