"""All_reduce of members on several hosts, in two levels and flat: `python -m experiments.comm_two_levels.run [--json]`.

Forked processes of this machine that count as hosts by their nodes' names: TCP over loopback between these, shared
memory inside. What crosses is counted; on a real network, which is slower than loopback, it weighs more.
"""

from __future__ import annotations

import multiprocessing
import time
from typing import Any
from unittest.mock import patch

import torch

from elastrain.comm.collectives import algorithms
from elastrain.comm.collectives.algorithms import AllReduce
from elastrain.comm.groups.communicator import Communicator
from elastrain.comm.wire.addresses import MeshConfig, Peer
from elastrain.comm.wire.mesh import Mesh
from experiments.harness import interleave, measure_and_print, quantile, ratio

PLACES = {"2x2": "xxyy", "2x4": "xxxxyyyy"}
SIZES = (1 << 20, 4 << 20, 16 << 20)
WAYS = {"flat": AllReduce.SCATTER_GATHER, "levels": AllReduce.TWO_LEVELS}
ROUNDS, REPEATS = 5, 3
_WAIT_S = 60.0


def _live(rank: int, places: str, size_bytes: int, wire: Any, told: Any) -> None:
    torch.set_num_threads(1)
    config = MeshConfig(transport="tcp")
    mesh = Mesh(me=f"m{rank}", node=places[rank], job="levels", secret=None, config=config)
    comm = Communicator(mesh, timeout_s=_WAIT_S)
    wire.send((f"m{rank}", places[rank], mesh.address))
    comm.edit(1, [Peer(id=member, node=node, address=address) for member, node, address in wire.recv()])
    tensor = torch.ones(size_bytes // 4)

    def sample(choice: AllReduce) -> float:
        with patch.object(algorithms, "choose_all_reduce", lambda *_sizes, **_where: (choice, "the experiment's")):
            comm.world.barrier().wait()
            before_s = time.perf_counter()
            for _ in range(REPEATS):
                comm.world.all_reduce(tensor, "max").wait()
            return (time.perf_counter() - before_s) / REPEATS

    for choice in WAYS.values():
        sample(choice)
    told.put(interleave({name: lambda c=choice: sample(c) for name, choice in WAYS.items()}, rounds=ROUNDS))
    wire.recv()
    comm.close()


def case(places: str, size_bytes: int) -> dict[str, list[float]]:
    """Seconds of one all_reduce in each round, on the slowest rank."""
    fork = multiprocessing.get_context("fork")
    told, pipes = fork.Queue(), [fork.Pipe() for _ in places]
    members = [
        fork.Process(target=_live, args=(rank, places, size_bytes, theirs, told), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for member in members:
        member.start()
    peers = [mine.recv() for mine, _ in pipes]
    for mine, _ in pipes:
        mine.send(peers)
    found = [told.get(timeout=_WAIT_S) for _ in places]
    for mine, _ in pipes:
        mine.send("end")
    for member in members:
        member.join(_WAIT_S)
    return {name: [max(times) for times in zip(*(one[name] for one in found), strict=True)] for name in WAYS}


def measured() -> dict[str, float]:
    """Seconds of either way, medians, and how many times faster two levels are, by place and size."""
    figures: dict[str, float] = {}
    for name, places in PLACES.items():
        for size_bytes in SIZES:
            times = case(places, size_bytes)
            key = f"{name}_{size_bytes >> 20}_MiB"
            figures |= {f"{way}_{key}_s": quantile(seconds, 0.5) for way, seconds in times.items()}
            figures[f"speedup_{key}"] = ratio(times["flat"], times["levels"])
    return figures


if __name__ == "__main__":
    measure_and_print(
        "comm_two_levels",
        measured,
        description=__doc__,
        settings={"places": PLACES, "rounds": ROUNDS, "repeats": REPEATS},
    )
