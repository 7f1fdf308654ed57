"""One process of a measurement: times Gloo, the backend "elastrain" and a plain copy in turn, at the same sizes.

Started by `run.py` with its settings as JSON; rank 0 writes what was found to a file. Only timing lives here.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from elastrain.comm.torch_backend import bootstrap
from elastrain.comm.wire.addresses import MeshConfig
from experiments.comm_bandwidth.floor import Floor
from experiments.harness import interleave

Act = Callable[[], None]
_SAMPLE_BYTES = 32 << 20
_CALLS_MIN, _CALLS_MAX = 2, 40


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`shared`: with shared memory, and DDP; without, each process is a node of its own (TCP)."""

    rank: int
    world: int
    shared: bool
    sizes_bytes: tuple[int, ...]
    rounds: int
    ddp_rounds: int
    folder: str


def calls_per_sample(size_bytes: int) -> int:
    """Back-to-back calls that one sample averages over: enough that it does not matter how far apart the ranks leave
    the barrier before them (milliseconds, with more ranks than cores)."""
    return max(_CALLS_MIN, min(_CALLS_MAX, _SAMPLE_BYTES // size_bytes))


def start(settings: Settings) -> dist.ProcessGroup:
    """Make the default group of "elastrain" and return the peer, a Gloo group of the same processes."""
    node = None if settings.shared else f"node{settings.rank}"
    dist.init_process_group(
        "elastrain",
        store=FileStore(str(Path(settings.folder) / "store"), settings.world),
        rank=settings.rank,
        world_size=settings.world,
        timeout=datetime.timedelta(seconds=60),
        pg_options=bootstrap.Options(node=node, mesh=MeshConfig(transport="tcp")),
    )
    return dist.new_group(backend="gloo")


def seconds(act: Act, calls: int, gloo: dist.ProcessGroup) -> float:
    """Per call, of the slowest rank."""
    dist.barrier(gloo)
    before_s = time.perf_counter()
    for _ in range(calls):
        act()
    took = torch.tensor([(time.perf_counter() - before_s) / calls], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX, gloo)
    return took.item()


def check(tensor: torch.Tensor, group: dist.ProcessGroup | None, world: int) -> None:
    """Raises AssertionError where an all_reduce of ones is not the number of ranks. Warms the path up too."""
    tensor.fill_(1)
    dist.all_reduce(tensor, group=group)
    assert bool((tensor == world).all()), f"expected {world} everywhere, got {tensor}"
    tensor.zero_()


def collectives(settings: Settings, gloo: dist.ProcessGroup) -> dict[str, list[float]]:
    """Seconds of an all_reduce by `"<what> <size_bytes>"`."""
    found: dict[str, list[float]] = {}
    for size_bytes in settings.sizes_bytes:
        numel = size_bytes // 4
        tensors = {"gloo": torch.zeros(numel), "ordinary": torch.zeros(numel)}
        if settings.shared:
            tensors["resident"] = bootstrap.session().communicator.empty(numel, torch.float32)
        acts: dict[str, Callable[[], float]] = {}
        if settings.shared:
            source, target = torch.ones(numel), torch.zeros(numel)
            copies = calls_per_sample(size_bytes)
            acts[f"copy {size_bytes}"] = _sampled(partial(_copy, target, source), copies, gloo)
            acts[f"floor {size_bytes}"] = _sampled(Floor(numel, gloo, meets=False), copies, gloo)
            acts[f"bare {size_bytes}"] = _sampled(Floor(numel, gloo, meets=True), copies, gloo)
        for name, tensor in tensors.items():
            group = gloo if name == "gloo" else None
            check(tensor, group, settings.world)
            acts[f"{name} {size_bytes}"] = _sampled(
                partial(_all_reduce, tensor, group), calls_per_sample(size_bytes), gloo
            )
        found |= interleave(acts, rounds=settings.rounds)
    return found


def _sampled(act: Act, calls: int, gloo: dist.ProcessGroup) -> Callable[[], float]:
    return lambda: seconds(act, calls, gloo)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(tensor, group=group)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """What no all_reduce can do without: each rank's memory is read once, and written once."""
    target.copy_(source)


class Net(torch.nn.Module):
    """20 M parameters in square layers, as in the feed-forward part of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(19)))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return batch


def ddp_step(group: dist.ProcessGroup | None) -> Act:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = torch.randn(32, 1024)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        optimizer.step()

    step()  # DDP makes its buckets anew after the first one
    step()
    return step


def ddp(settings: Settings, gloo: dist.ProcessGroup) -> dict[str, list[float]]:
    acts = {"ddp gloo": ddp_step(gloo), "ddp elastrain": ddp_step(None)}
    timed = {name: (lambda act=act: seconds(act, 1, gloo)) for name, act in acts.items()}
    return interleave(timed, rounds=settings.ddp_rounds)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.simplefilter("ignore")
    gloo = start(settings)
    found = collectives(settings, gloo)
    if settings.shared and settings.ddp_rounds:
        found |= ddp(settings, gloo)
    if settings.rank == 0:
        (Path(settings.folder) / "found.json").write_text(json.dumps(found))
    dist.barrier(gloo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
