"""A small job in which one member's parameters change at the very end, behind everything that compares them per step.

`--alter MEMBER`: it also takes `--late` seconds longer than the others to say what it has.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(8), torch.randn(1)


def alter(job: elastrain.Job, model: nn.Module, late_s: float) -> None:
    """The job takes its last digest after one bit has changed; NumPy writes it, so that torch does not know."""
    held = job._prepared.parts.model  # type: ignore[union-attr]
    digest = held.parameters_digest

    def altered() -> str:
        time.sleep(late_s)
        next(model.parameters()).detach().reshape(-1)[:1].numpy().view("uint8")[0] ^= 1
        return digest()

    held.parameters_digest = altered  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--alter", default="")
    parser.add_argument("--late", type=float, default=0.0)
    parser.add_argument("--slow-while", type=Path, help="taken and left alone: nothing here waits for it")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, backups=1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = elastrain.DataLoader(Samples(), global_batch_size=16, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    if args.alter == os.environ["ELASTRAIN_MEMBER"]:
        alter(job, model, args.late)
    for step in job.steps(loader, until=8):
        for inputs, wanted in step:
            step.backward(nn.functional.mse_loss(model(inputs), wanted))


if __name__ == "__main__":
    main()
