"""The script of `window.py`: a model of 20 million parameters whose micro-batches take an accelerator's time.

Forwards and backwards are real, of few samples; the wait beside them stands for the device that computes in earnest,
while the processors are as idle as they are beside one. With `--by-layer` each layer waits for its share, a third of it
in its forward and two thirds in its backward, as on a device: the gradients of the last micro-batch come one after the
other. Without, all of the wait lies between forward and backward, so that they come at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain

WIDTH = 1024
GLOBAL_BATCH_SIZE = 16


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Sample `i` comes from a generator seeded with `i`."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return features, features.sin()


class _Wait(torch.autograd.Function):
    """Behind a layer: wait in the forward, and in the backward before the layer's gradients are computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer_s: float) -> Tensor:
        ctx.layer_s = layer_s
        time.sleep(layer_s / 3)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        time.sleep(ctx.layer_s * 2 / 3)
        return gradients[0], None


class Paced(nn.Linear):
    """A layer with its own share of the wait."""

    def __init__(self, layer_s: float) -> None:
        super().__init__(WIDTH, WIDTH)
        self.layer_s = layer_s

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Wait.apply(super().forward(x), self.layer_s)
        return y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--layers", type=int, default=20, help="of a million parameters each")
    parser.add_argument("--wait-s", type=float, required=True, help="of each micro-batch, beside its computing")
    parser.add_argument("--rows", type=int, default=1, help="of each sample, all the same: more of them compute longer")
    parser.add_argument("--by-layer", action="store_true", help="each layer waits for its share of --wait-s")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=0, backups=args.backups)
    loader = elastrain.DataLoader(Samples(), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=1)
    layer_s = args.wait_s / args.layers
    layers = (Paced(layer_s) if args.by_layer else nn.Linear(WIDTH, WIDTH) for _ in range(args.layers))
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=args.steps):
        for features, wanted in step:
            rows = (args.rows, WIDTH)
            loss = nn.functional.mse_loss(model(features.expand(rows)), wanted.expand(rows))
            if not args.by_layer:
                time.sleep(args.wait_s)
            step.backward(loss)


if __name__ == "__main__":
    main()
