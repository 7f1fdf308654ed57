"""Jobs of simulated nodes in network namespaces, and what goes wrong between these."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from elastrain.launcher.namespaces.impairments import Impairment, Loss, Way, between, condition
from elastrain.launcher.namespaces.switch import SWITCH, Switch
from tests.support.nodes_harness import NodesJob

NODES = ("node0", "node1", "node2")
PEERS, ETCD = NODES, (SWITCH,)
ALL = (*NODES, SWITCH)


def netns_job(tmp_path: Path, *options: str, arguments: tuple[str, ...], nodes: int = 3) -> NodesJob:
    """One worker each. Names are the machine's: several tests may run at once."""
    job = f"{tmp_path.name}-{os.getpid()}"[-60:].strip("-._")
    here = ("--local-nodes", str(nodes), "--netns", "--inject", "--rdzv-id", job)
    return NodesJob(tmp_path, *here, *options, arguments=arguments)


class Network:
    """Of a running job: the tests' own hand on it, beside the launcher's."""

    def __init__(self, job: NodesJob, nodes: Sequence[str] = NODES) -> None:
        self.switch = Switch(job.events("start")[0]["job"], nodes)

    def impair(self, *impairments: Impairment) -> None:
        """From now on it is so, whatever was before; with nothing, all is well."""
        self.switch.apply(condition(impairments))

    def cut(self, node: str, others: Sequence[str] = ALL, way: Way = "both") -> None:
        self.impair(Loss(pairs=between([node], others, way)))

    def connections(self, pid: int) -> set[tuple[str, str]]:
        """Of the host on which the process runs: (own address, peer's address) of every open TCP connection."""
        lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
        ends = [line.split()[1:4] for line in lines]
        return {(_dotted(own), _dotted(peer)) for own, peer, state in ends if state == "01"}


def _dotted(end: str) -> str:
    """The address in `0B004D0A:1F90`, the kernel's way to write 10.77.0.11:8080."""
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(end.partition(":")[0])))
