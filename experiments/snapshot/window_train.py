"""The script of `window.py`: a model of 20 million parameters whose micro-batches take an accelerator's time.

Forwards and backwards are real, of few samples; the wait beside them stands for the device that computes in earnest,
while the processors are as idle as they are beside one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--layers", type=int, default=20, help="of a million parameters each")
    parser.add_argument("--wait-s", type=float, required=True, help="of each micro-batch, beside its computing")
    parser.add_argument("--rows", type=int, default=1, help="of each sample, all the same: more of them compute longer")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=0, backups=args.backups)
    loader = elastrain.DataLoader(Samples(), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(args.layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=args.steps):
        for features, wanted in step:
            rows = (args.rows, WIDTH)
            loss = nn.functional.mse_loss(model(features.expand(rows)), wanted.expand(rows))
            time.sleep(args.wait_s)
            step.backward(loss)


if __name__ == "__main__":
    main()
