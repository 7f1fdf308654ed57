"""The world of processes that another launcher (torchrun, mpirun, srun) has started, as its variables tell it.

Everything here is pure. A world on several hosts becomes a job whose nodes are these hosts, see `hosts_of`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

HOSTS_MAX = 3
"""Number of hosts that are named for the quorum of a job."""
FIRST_PORT, PLACES, PORTS = 20000, 3000, 3
"""First port of the quorums of worlds, which lie below the kernel's own choice of ports, their number, and the ports of
each. They follow one another."""


_HOSTS = r"[^,\[\]]+(?:\[[^\[\]]*\][^,\[\]]*)*"
"""Pattern of an entry in Slurm's list of hosts."""


@dataclass(frozen=True, kw_only=True)
class _Names:
    """Names of the variables of one launcher. `node` and `nodes` are "" if it does not tell the hosts."""

    launcher: str
    size: str
    rank: str
    here: str
    """Variable with the number of ranks on this host."""
    local_rank: str
    node: str = ""
    nodes: str = ""
    world: tuple[str, ...]
    """Variables that are equal in all ranks on all hosts, and differ between worlds."""


_HYDRA = _Names(
    launcher="mpirun",
    size="PMI_SIZE",
    rank="PMI_RANK",
    here="MPI_LOCALNRANKS",
    local_rank="MPI_LOCALRANKID",
    world=("MASTER_PORT",),
)
_LAUNCHERS = (
    _Names(
        launcher="torchrun, or a launcher like it,",
        size="WORLD_SIZE",
        rank="RANK",
        here="LOCAL_WORLD_SIZE",
        local_rank="LOCAL_RANK",
        node="GROUP_RANK",
        nodes="GROUP_WORLD_SIZE",
        world=("TORCHELASTIC_RUN_ID", "MASTER_PORT"),  # the number of restarts differs between hosts
    ),
    # Before srun, which may have started the daemons of mpirun: one on each host.
    _Names(
        launcher="mpirun",
        size="OMPI_COMM_WORLD_SIZE",
        rank="OMPI_COMM_WORLD_RANK",
        here="OMPI_COMM_WORLD_LOCAL_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        world=("PMIX_NAMESPACE", "MASTER_PORT"),
    ),
    _HYDRA,
    _Names(
        launcher="srun",
        size="SLURM_STEP_NUM_TASKS",
        rank="SLURM_PROCID",
        here="SLURM_STEP_TASKS_PER_NODE",
        local_rank="SLURM_LOCALID",
        node="SLURM_NODEID",
        nodes="SLURM_STEP_NUM_NODES",
        world=("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
)
_EQUAL_ON_A_HOST = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE"),
)
"""Variables that are equal in all ranks of a world on one host, and differ between the worlds of a host."""


@dataclass(frozen=True, kw_only=True)
class ForeignWorld:
    """The processes that another launcher has started, and the place of this one among them."""

    launcher: str
    variable: str
    """The variable that tells the size."""
    rank: int
    size: int
    per_node: int
    """Number of ranks on this host."""
    local_rank: int = 0
    node: int | None = None
    """Number of this host, or None if the launcher does not tell it."""
    nodes: int = 1
    hosts: tuple[str, ...] = ()
    """Names of the first hosts, as far as the launcher tells them."""
    own_name: str = ""
    """Slurm's name of this host, or "" under other launchers."""
    names: tuple[str, ...] = ()
    """`NAME=value` of the variables that name the world on all hosts."""
    names_here: tuple[str, ...] = ()
    """Likewise on this host."""

    @property
    def first_rank(self) -> int:
        """The lowest rank on this host, if ranks are dealt out host by host."""
        return self.rank - self.local_rank

    def address(self, user: int, parent: int) -> str:
        """Return the abstract UNIX address, without the leading NUL, at which this user's ranks meet on this host.

        `parent`: process id of the parent process, which tells worlds apart if no variable does.
        """
        told = list(self.names_here) or [f"parent={parent}"]  # Hydra starts all ranks of a host itself
        if self.nodes > 1 and self.node is not None:  # a test may have several hosts on one machine
            told.append(f"node={self.node}")
        return f"elastrain/ranks/{_digest([str(user), str(self.size), *told])}"


@dataclass(frozen=True, kw_only=True)
class WorldHosts:
    """The hosts of a world as the nodes of a job."""

    launcher: str
    nodes: int
    node: int
    """Number of this host. The hosts are counted in the order of their ranks."""
    hosts: tuple[str, ...]
    """Hosts that found the job's quorum, the first one first."""
    own_name: str
    """Slurm's name of this host, or ""."""
    job: str
    """Name of the job, equal on all hosts."""
    port: int
    """First of the quorum's ports."""


def world_in(variables: Mapping[str, str]) -> ForeignWorld | None:
    """Return the world of several processes that these variables tell of, or None."""
    worlds = [row for row in _LAUNCHERS if _number(variables, row.size) and row.rank in variables]
    worlds = [row for row in worlds if _count(variables[row.size]) > 1 and variables[row.rank].isdecimal()]
    if not worlds:
        return None
    first = worlds[0]
    if first is _HYDRA:  # srun may tell its variables too, and then tells more
        first = next((row for row in worlds if row.here in variables), first)
    size, rank = _count(variables[first.size]), int(variables[first.rank])
    # A script of a launcher may export RANK and WORLD_SIZE, and leave the rest to that launcher's variables.
    alike = [first, *(row for row in worlds if row is not first and _count(variables[row.size]) == size)]
    node = _told(variables, [row.node for row in alike])
    here = next((each for row in alike if (each := _ranks_on(variables.get(row.here, ""), node or 0))), size)
    per_node = min(here, size)
    local_rank = _told(variables, [row.local_rank for row in alike])
    hosts = _hosts_in(variables, alike)
    nodes = _told(variables, [row.nodes for row in alike]) or -(-size // per_node)
    if per_node == size or (hosts and _is_loopback(hosts[0])):
        per_node, nodes, node, local_rank = size, 1, None, rank
    return ForeignWorld(
        launcher=first.launcher,
        variable=first.size,
        rank=rank,
        size=size,
        per_node=per_node,
        local_rank=rank % per_node if local_rank is None else local_rank,
        node=node,
        nodes=nodes,
        hosts=hosts,
        own_name=variables.get("SLURMD_NODENAME", "") if _is_step(variables, alike) else "",
        names=tuple(_pairs(variables, first.world)),
        names_here=tuple(_pairs(variables, _EQUAL_ON_A_HOST)),
    )


def hosts_of(world: ForeignWorld) -> WorldHosts | str:
    """Return the hosts of a world on several hosts as the nodes of a job, or the reason why they cannot be these."""
    if world.node is None and world.size % world.per_node:
        return (
            f"it does not tell which of the hosts this is, and {world.size} ranks are not {world.per_node} on each: "
            "start as many ranks on each host"
        )
    if not world.hosts:
        return "it does not tell the host of rank 0: set MASTER_ADDR to it in the environment of all ranks"
    named = _digest([str(world.size), *world.names])
    # With two hosts, the quorum has one member: of two members none could be lost.
    named_hosts = world.hosts[: HOSTS_MAX if world.nodes >= HOSTS_MAX else 1]
    return WorldHosts(
        launcher=world.launcher,
        nodes=world.nodes,
        node=world.first_rank // world.per_node if world.node is None else world.node,
        hosts=named_hosts,
        own_name=world.own_name,
        job=f"ranks-{named[:12]}",
        port=_port_of(int(named, 16), dict(pair.split("=", 1) for pair in world.names).get("MASTER_PORT", "")),
    )


def expand_hosts(listed: str, at_most: int = HOSTS_MAX) -> tuple[str, ...]:
    """Return the first hosts of Slurm's list of hosts, such as "a[01-03,7],b"."""
    found: list[str] = []
    if not re.fullmatch(rf"{_HOSTS}(,{_HOSTS})*", listed):
        return ()
    for part in re.findall(_HOSTS, listed):
        for name in _expanded(part):
            found.append(name)
            if len(found) == at_most:
                return tuple(found)
    return tuple(found)


def _expanded(part: str) -> Iterator[str]:
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    numbers, _, after = rest.partition("]")
    for each in numbers.split(","):
        first, _, last = each.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return
        for number in range(int(first), int(last or first) + 1):
            for end in _expanded(after):
                yield f"{before}{number:0{len(first)}}{end}"


def _hosts_in(variables: Mapping[str, str], alike: Sequence[_Names]) -> tuple[str, ...]:
    """Return the first hosts: those of Slurm's step, or the one of MASTER_ADDR."""
    if _is_step(variables, alike) and (listed := expand_hosts(variables["SLURM_STEP_NODELIST"])):
        return listed
    master = variables.get("MASTER_ADDR", "")
    return (master,) if master else ()


def _is_step(variables: Mapping[str, str], alike: Sequence[_Names]) -> bool:
    return any(row.launcher == "srun" for row in alike) and "SLURM_STEP_NODELIST" in variables


def _is_loopback(host: str) -> bool:
    """Return True for names of this host that another host cannot mean."""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.\d+){3}", host))


def _port_of(number: int, taken: str) -> int:
    """Return the first port of the quorum. None of its ports is `taken`, the launcher's own."""
    place = number % PLACES
    port = FIRST_PORT + PORTS * place
    if taken.isdecimal() and port <= int(taken) < port + PORTS:
        port = FIRST_PORT + PORTS * ((place + 1) % PLACES)
    return port


def _ranks_on(text: str, node: int) -> int:
    """Return the number of ranks on a host in a number, or in Slurm's list such as "4(x2),3"; 0 if it is unknown."""
    counts: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if found is None:
            return 0
        counts += [int(found[1])] * min(int(found[2] or 1), node + 1)
    return counts[node] if node < len(counts) else counts[0]


def _told(variables: Mapping[str, str], names: Sequence[str]) -> int | None:
    """Return the number in the first of these variables that has one."""
    return next((int(text) for name in names if (text := _number(variables, name))), None)


def _number(variables: Mapping[str, str], name: str) -> str:
    text = variables.get(name, "")
    return text if text.isdecimal() else ""


def _count(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _pairs(variables: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return [f"{name}={variables[name]}" for name in names if name in variables]


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
