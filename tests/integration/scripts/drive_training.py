"""Activations and, if asked for, optimizer shards on a drive that fails now and then. Prints the end's digest."""

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor, nn

import elastrain
from elastrain import room as deciding
from elastrain.offload import hooks
from elastrain.offload.engines.posix import PosixEngine
from elastrain.offload.faults import Faults, FaultyEngine
from elastrain.runtime import room

KEPT_BYTES = 3 << 20
"""Of six times a little more than half a MiB: most of it has to leave, however slow the drive is."""


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


class FailsAt(FaultyEngine):
    """Some of its reads go wrong: number of the read -> how."""

    def __init__(self, directory: str, faults: dict[int, Faults]) -> None:
        super().__init__(PosixEngine(directory), Faults())
        self._at = faults
        self._read = 0

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        self._read += 1
        self._faults = self._at.get(self._read, Faults())
        super().read(offset_bytes, views)


class SmallOffload(hooks.ActivationOffload):
    def set_memory_limit(self, limit_bytes: int) -> None:
        super().set_memory_limit(min(limit_bytes, KEPT_BYTES))


def faulty(place: ModuleType, told: Sequence[str]) -> None:
    """`told`: "20:flip", "40:eio"."""
    kinds = {"flip": Faults(flips_after=0), "eio": Faults(read_fails_after=0)}
    faults = {int(at): kinds[kind] for at, kind in (each.split(":") for each in told)}
    place.PosixEngine = lambda directory: FailsAt(directory, faults)  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--activation-faults", nargs="*", default=[], help="READ:KIND, on m1")
    parser.add_argument("--shard-faults", nargs="*", default=[], help="READ:KIND, on m1")
    parser.add_argument("--shards", action="store_true", help="all optimizer shards are on the drive")
    args = parser.parse_args()
    if os.environ.get("ELASTRAIN_MEMBER") == "m1":
        faulty(hooks, args.activation_faults)
        faulty(room, args.shard_faults)
    room.ActivationOffload = SmallOffload  # type: ignore[misc]
    if args.shards:
        chosen = deciding.choose_shards
        deciding.choose_shards = lambda held, wanted_bytes: chosen(held, 1 << 60)
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, run_length=2)
    sizes = [64, *[256] * 6, 64]
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1)) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=8 * 512, micro_batch_size=512)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
