"""A classifier that counts its right answers, and logs every step: to a file, and to other loggers where it is told."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(16) + index % 5, index % 5


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--events", type=Path)
    parser.add_argument("--wandb", type=Path)
    parser.add_argument("--micro-batch-size", type=int, default=4)
    parser.add_argument("--of-torch", type=Path, help="a loader of torch, and a summary writer of this folder")
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--only-rank-0", action="store_true", help="a mistake")
    parser.add_argument("--slow", type=float, default=0.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, backups=args.backups)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = elastrain.DataLoader(
        Samples(), global_batch_size=24, micro_batch_size=args.micro_batch_size, num_workers=0
    )
    of_torch = torch.utils.data.DataLoader(Samples(), 24, shuffle=True)
    model, optimizer, loader = job.prepare(model, optimizer, of_torch if args.of_torch else loader)
    loggers: list[Any] = [elastrain.Jsonl(args.log)] if args.log else []
    loggers += [elastrain.TensorBoard(args.events)] if args.events else []
    loggers += [elastrain.Wandb("tests", mode="offline", dir=args.wandb)] if args.wandb else []
    writer = elastrain.SummaryWriter(job, args.of_torch, purge_step=100) if args.of_torch else job.loggers(*loggers)
    for step in job.steps(loader, until=args.steps):
        for inputs, labels in step:
            logits = model(inputs)
            step.add("right", (logits.argmax(-1) == labels).sum())
            step.add("answers", len(labels))
            time.sleep(args.slow)
            step.backward(nn.functional.cross_entropy(logits, labels), weight=len(labels))
        if not args.only_rank_0 or job.rank == 0:
            accuracy = step.sums["right"] / step.sums["answers"]
            figures = {"loss": step.loss, "accuracy": accuracy, "epoch": step.epoch, "seconds": time.monotonic()}
            if writer is None:
                job.log(figures)
            else:
                for name, value in figures.items():
                    writer.add_scalar(name, value, 100 + step.number)
        if step.number % 5 == 4:
            job.log({"again": step.number})
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
