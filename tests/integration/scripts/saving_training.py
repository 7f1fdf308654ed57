"""A script that writes its own checkpoints on rank 0 after every step, and begins from one of them: `--load FILE`.

All batches are alike in order, and nothing is drawn, so a job that begins from a file goes on as the job that wrote it.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elastrain

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=6)
arguments.add_argument("--out", type=Path)
arguments.add_argument("--load", type=Path)
arguments.add_argument("--late-load", action="store_true", help="load after prepare")
arguments.add_argument("--optimizer", default="AdamW")
args = arguments.parse_args()

job = elastrain.init(seed=3)
torch.manual_seed(1)
embedding = nn.Embedding(50, 33)
model = nn.Sequential(
    embedding, nn.Linear(33, 70), nn.LayerNorm(70), nn.GELU(), nn.Linear(70, 33), nn.Linear(33, 50, bias=False)
)
model[5].weight = embedding.weight
settings: dict[str, dict[str, Any]] = {"AdamW": {"lr": 1e-2}, "SGD": {"lr": 0.1, "momentum": 0.9}, "Adagrad": {}}
optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), **settings[args.optimizer])
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
texts = torch.randint(0, 50, (48, 9), generator=torch.Generator().manual_seed(7))
loader = elastrain.DataLoader(
    TensorDataset(texts), global_batch_size=48, micro_batch_size=4, shuffle=False, num_workers=0
)


def load() -> None:
    saved = torch.load(args.load, weights_only=True)
    for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
        part.load_state_dict(saved[name])


def save(step: int) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(parts, args.out / "new.pt")
    os.replace(args.out / "new.pt", args.out / f"{step}.pt")


def loss_of(batch: list[Tensor]) -> Tensor:
    told = model(batch[0][:, :-1])
    return nn.functional.cross_entropy(told.reshape(-1, 50), batch[0][:, 1:].reshape(-1))


if args.load and not args.late_load:
    load()
model, optimizer, loader = job.prepare(model, optimizer, loader)
if args.load and args.late_load:
    load()
for step in job.steps(loader, until=args.steps):
    for batch in step:
        step.backward(loss_of(batch))
    scheduler.step()
    if args.out and job.rank == 0:
        save(step.number)
