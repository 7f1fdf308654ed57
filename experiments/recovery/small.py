"""A training script with steps so small that many kills fit into a minute: an MLP on made-up data.

While the file named by `--slow-while` exists, each micro-batch waits a little, so that faults find a step to strike in
and newcomers find a free core; waiting changes no bit.
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

SAMPLES, FEATURES, WIDTH = 1000, 32, 64
GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE = 64, 8
PAUSE_S = 0.2


class Teacher(Dataset[tuple[Tensor, Tensor]]):
    """Sample `i`: features drawn from a generator seeded with `i`, and a fixed function of them."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        features = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return features, features.sin().sum().reshape(1)


def build() -> nn.Sequential:
    """Dropout included: a redone micro-batch must draw the same mask."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--slow-while", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=0, backups=args.backups)
    loader = elastrain.DataLoader(Teacher(), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE)
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for features, wanted in step:
            loss = nn.functional.mse_loss(model(features), wanted)
            if args.slow_while is not None and args.slow_while.exists():
                time.sleep(PAUSE_S)
            step.backward(loss)


if __name__ == "__main__":
    main()
