"""A small training whose bits differ between members by one planted cause, or by none.

Each plant is a module in the middle of the model, `planted`, or for some of them the body of the loop or the dataset.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import elastrain

WIDTH = 16
Change = Callable[[Tensor], Tensor]


class Planted(nn.Module):
    """A layer that changes its input by a function."""

    steady: Tensor
    mean: Tensor

    def __init__(self, change: Callable[[Planted, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.calls = 0
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.stream = torch.get_rng_state()
        self.heads = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("red", "green", "blue", "grey", "pink")})
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self, x)


def own_generator(layer: Planted, x: Tensor) -> Tensor:
    return x + 0.1 * torch.randn(x.shape, generator=layer.own)


def python_random(layer: Planted, x: Tensor) -> Tensor:
    return x * layer.python.uniform(0.9, 1.1)


def numpy_generator(layer: Planted, x: Tensor) -> Tensor:
    return x + torch.from_numpy(layer.numpy.normal(size=tuple(x.shape)).astype("float32"))


def counter(layer: Planted, x: Tensor) -> Tensor:
    layer.calls += 1
    return x * (1 + 0.01 * layer.calls)


class RacySum(torch.autograd.Function):
    """A kernel that adds as atomics do: in the order in which its threads arrive."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        total: Tensor = torch.ops.planted.racy_sum(x)
        return total

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Any:
        return gradients[0].expand(32, WIDTH)


@torch.library.custom_op("planted::racy_sum", mutates_args=())
def racy_sum(x: Tensor) -> Tensor:
    """Add the rows by four threads, in the order in which they arrive."""
    total, wait = torch.zeros(WIDTH), np.random.default_rng().uniform(0, 0.002, len(x))

    def add(rows: Tensor, waits: Any) -> None:
        for row, seconds in zip(rows, waits, strict=True):
            time.sleep(seconds)
            total.add_(row)

    threads = [threading.Thread(target=add, args=(x[at::4].detach(), wait[at::4])) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return total


def atomics(layer: Planted, x: Tensor) -> Tensor:
    noise = torch.linspace(-1.0, 1.0, 32 * WIDTH).view(32, WIDTH) ** 3
    total: Tensor = RacySum.apply(noise * x.mean(0, keepdim=True))  # type: ignore[no-untyped-call]
    return x + total


def threads(layer: Planted, x: Tensor) -> Tensor:
    total: Tensor = (x.mean() * torch.linspace(-1.0, 1.1, 3_000_001)).exp().sum()
    return x * total * 1e-7


def hash_order(layer: Planted, x: Tensor) -> Tensor:
    for name in set(layer.heads):
        x = torch.tanh(layer.heads[name](x))
    return x


def own_stream(layer: Planted, x: Tensor) -> Tensor:
    before = torch.get_rng_state()
    torch.set_rng_state(layer.stream)
    x = functional.dropout(x, 0.3)
    layer.stream = torch.get_rng_state()
    torch.set_rng_state(before)
    return x


def clock(layer: Planted, x: Tensor) -> Tensor:
    return x * (1 + time.time() % 1)


def rank(layer: Planted, x: Tensor) -> Tensor:
    return x * 2 if JOB.rank == 0 else x + x * 1.5


def buffer(layer: Planted, x: Tensor) -> Tensor:
    layer.mean.mul_(0.9).add_(x.detach().mean(0))
    return x - layer.mean


MEMO: dict[tuple[int, ...], Tensor] = {}


def memo(layer: Planted, x: Tensor) -> Tensor:
    return x - MEMO.setdefault(tuple(x.shape), x.detach().mean(0))


def uninitialised(layer: Planted, x: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    out[1:] = 1.0
    return x * out.clamp(-1, 1)


def healthy(layer: Planted, x: Tensor) -> Tensor:
    """Draw and iterate in all the ways that members agree on."""
    x = functional.dropout(x, 0.1) * random.uniform(0.9, 1.1)
    x = x + torch.from_numpy(np.random.normal(size=WIDTH).astype("float32"))
    for name in sorted(set(layer.heads)):
        x = x + checkpoint(layer.heads[name], x, use_reentrant=False)
    scratch = torch.empty(len(x), 2 * WIDTH)
    scratch[:, :WIDTH], scratch[:, WIDTH:] = x.detach(), 1.0
    layer.mean = x.detach().mean(0)  # kept, and not used
    return x + scratch.sum() * 1e-3


PLANTS: dict[str, tuple[Callable[[Planted, Tensor], Tensor], str]] = {
    "own generator": (own_generator, "generator"),
    "python's random": (python_random, "python random"),
    "numpy's generator": (numpy_generator, "numpy generator"),
    "counter": (counter, "counter"),
    "atomics": (atomics, "kernel"),
    "thread count": (threads, "threads"),
    "hash order": (hash_order, "hash order"),
    "dropout of another stream": (own_stream, "reseeded"),
    "clock": (clock, "clock"),
    "rank": (rank, "rank"),
    "buffer": (buffer, "buffer"),
    "memo of the first batch": (memo, "memo"),
    "uninitialised memory": (uninitialised, "uninitialised"),
}
"""Name -> what the planted layer does, and the cause that `elastrain doctor --bits` has to name."""


class Images(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return torch.randn(3, 8, 8, generator=drawn), torch.tensor(index % 4)


def main() -> None:
    global JOB
    parser = argparse.ArgumentParser()
    parser.add_argument("--plant", choices=PLANTS)
    parser.add_argument("--steps", type=int, default=2)
    options = parser.parse_args()
    JOB = elastrain.init(seed=3)
    if options.plant == "thread count":
        torch.set_num_threads(1 + JOB.rank)
    model = nn.Sequential()
    model.add_module("conv", nn.Conv2d(3, 4, 3))
    model.add_module("norm", nn.BatchNorm2d(4))
    model.add_module("flat", nn.Flatten())
    model.add_module("narrow", nn.Linear(4 * 36, WIDTH))
    model.add_module("planted", Planted(PLANTS[options.plant][0] if options.plant else healthy))
    model.add_module("drop", nn.Dropout(0.2))
    model.add_module("head", nn.Linear(WIDTH, 4))
    loader = elastrain.DataLoader(Images(), global_batch_size=16, micro_batch_size=4)
    model, _, loader = JOB.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    for step in JOB.steps(loader, until=options.steps):
        for images, labels in step:
            step.backward(functional.cross_entropy(model(images), labels))
    print(f"digest {JOB.digest()}", flush=True)


JOB: Any = None
if __name__ == "__main__":
    main()
