"""A small model with all that decides bits: dropout, a tied weight, two parameter groups, a schedule, clipping."""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """Random inputs: seeded per sample by the loader, so they are the same wherever they are drawn."""

    def __init__(self, count: int = 500) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.randn(16), index % 32


class Model(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, depth: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.entry = nn.Linear(16, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(norm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.2)) for _ in range(depth)
        )
        self.unused = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        hidden = self.entry(inputs.to(self.entry.weight.dtype)) + self.embedding(labels.flip(0))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden).float()


def hold_up(slow: Path, step: int) -> None:
    """Soon far enough, and long not at the end. Once the file is gone nobody waits any more."""
    until_s = time.monotonic() + (0.15 if step < 8 else 0.5 if step < 14 else 1.0)
    while slow.exists() and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(0.1, left_s))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", default="1")
    parser.add_argument("--audit", default="0")
    parser.add_argument("--run-length", type=int, default=2)
    parser.add_argument("--nan-at", type=int, default=-1, help="step whose loss is NaN")
    parser.add_argument("--raise-at", type=int, default=-1, help="step in which the fifth micro-batch raises")
    parser.add_argument("--break-at", type=int, default=-1, help="step after which the loop is left")
    parser.add_argument("--checkpoint-at", type=int, default=-1, help="step in which one member asks for a checkpoint")
    parser.add_argument("--checkpoint-after", type=int, default=-1, help="step after which one member asks for one")
    parser.add_argument("--patience", type=int, default=-1, help="steps that a process waits for a better loss")
    parser.add_argument("--slow-while", type=Path, help="micro-batches wait a little while this file exists")
    args = parser.parse_args()
    torch.set_num_threads(1)
    backups = args.backups if args.backups == "all" else int(args.backups)
    audit = args.audit if args.audit == "all" else int(args.audit)
    job = elastrain.init(seed=7, run_length=args.run_length, backups=backups)
    job.audit(audit)
    model = Model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    loader = elastrain.DataLoader(Samples(), global_batch_size=40, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=0.5)
    waited = 0  # of this process alone: nothing carries it over to a newcomer
    for step in job.steps(loader, until=args.steps):
        if step.number == args.checkpoint_at and job.rank == 0:
            job.checkpoint()
        for number, (inputs, labels) in enumerate(step):
            loss = nn.functional.cross_entropy(model(inputs, labels), labels)
            if step.number == args.nan_at:
                loss = loss * float("nan")
            if step.number == args.raise_at and step.micro_batch == 4:
                raise KeyError(f"a mistake in micro-batch {step.micro_batch}, number {number > 99}")
            if args.slow_while is not None:
                hold_up(args.slow_while, step.number)
            step.backward(loss, weight=float(len(labels)))
        scheduler.step()
        waited += step.loss > 0.0  # never good enough
        if step.number == args.checkpoint_after and job.rank == job.world_size - 1:
            job.checkpoint()
        if step.number == args.break_at or waited == args.patience:
            break
    sys.stderr.write(f"digest {job.digest()} lr {optimizer.param_groups[0]['lr']:.6f}\n")


if __name__ == "__main__":
    main()
