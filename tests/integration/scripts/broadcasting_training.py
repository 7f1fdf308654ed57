"""A script that broadcasts in each step, before the micro-batches and behind them. Members may be killed there."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from typing import Any

import torch
from torch import nn

import elastrain

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=4)
arguments.add_argument("--from-rank", type=int, default=0)
arguments.add_argument("--kill", default="", help="member that is killed when its value is asked for behind step 1")
arguments.add_argument("--no-data", default="", help="rank 0 broadcasts something that is no data: value, or function")
arguments.add_argument("--only-main", action="store_true", help="only rank 0 broadcasts")
arguments.add_argument("--mixed", action="store_true", help="rank 0 broadcasts where the others evaluate")
arguments.add_argument("--place", default="", help="bad place of a call: before, within, or behind")
args = arguments.parse_args()

job = elastrain.init(seed=3)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(1))
samples = list(zip(inputs, inputs[:, :4].argmax(1), strict=True))
loader = elastrain.DataLoader(samples, global_batch_size=24, micro_batch_size=4, num_workers=0)
model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
kept: dict[str, Any] = {"seen": [], "rate": 1.0}
job.register("kept", kept)


class Deadly(dict[str, Any]):
    """A value whose sender dies while it is written as text."""

    def items(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def value() -> Any:
    if args.no_data and job.is_main:
        return {"fn": [1, value if args.no_data == "function" else object()]}
    if job.member == args.kill and step.number == 1 and step.is_committed:
        return Deadly()
    at = float(step.number + step.is_committed)
    return {"rate": 1 / (1 + at), "weights": model[0].weight[0] * at, "name": ("words", None, b"bytes"), 3: [True]}


def broadcast() -> None:
    if args.only_main and not job.is_main:
        return
    if args.mixed and not job.is_main:
        job.evaluate(lambda batch: {"samples": len(batch[0])}, samples, batch_size=100)
    got = job.broadcast(value(), from_rank=args.from_rank)
    assert type(got["weights"]) is torch.Tensor
    got["weights"].add_(0)  # an own copy
    kept["last"] = [got["rate"], got["weights"].tolist(), got["name"], got[3], repr(list(got))]


if args.place == "before":
    job.broadcast(1)
for step in job.steps(loader, until=args.steps):
    broadcast()
    for x, target in step:
        if args.place == "within":
            job.broadcast(1)
        step.backward(nn.functional.cross_entropy(model(x), target) * kept["rate"])
    broadcast()
    kept["rate"] = kept["last"][0]
    kept["seen"].append(kept["last"])
if args.place == "behind":
    job.broadcast(1)
sys.stdout.write(f"{job.member} kept {json.dumps(kept['seen'], default=repr)}\n")
