"""A script that trains 20 million parameters and saves a checkpoint of its own, in a job or (`--plain`) without one."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

STEPS, SAVED_BEHIND, MICRO_BATCHES, ROWS, WIDTH = 12, (5, 8), 16, 64, 1580


def parts() -> tuple[nn.Module, torch.optim.Optimizer, list[torch.Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4), list(torch.randn(MICRO_BATCHES * ROWS, WIDTH))


def save(model: nn.Module, optimizer: Any, path: Path) -> None:
    began_s = time.monotonic()
    state = optimizer.state_dict()
    gathered_s = time.monotonic()
    torch.save({"model": model.state_dict(), "optimizer": state}, path)
    sys.stdout.write(f"saved {time.monotonic() - began_s:.4f} {gathered_s - began_s:.4f}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--path", type=Path, required=True)
    args = parser.parse_args()
    model, optimizer, samples = parts()
    if args.plain:
        for batch in torch.stack(samples).chunk(MICRO_BATCHES)[:2]:
            model(batch).square().mean().backward()
            optimizer.step()
            save(model, optimizer, args.path)
        return
    import elastrain

    job = elastrain.init(seed=0, backups=1)
    loader: Any = elastrain.DataLoader(
        samples, global_batch_size=MICRO_BATCHES * ROWS, micro_batch_size=ROWS, num_workers=0
    )
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    ended_s = time.monotonic()
    for step in job.steps(loader, until=STEPS):
        computed_s = []
        for batch in step:
            began_s = time.monotonic()
            step.backward(model(batch).square().mean())
            computed_s.append(time.monotonic() - began_s)
        now_s, is_behind = time.monotonic(), step.number - 1 in SAVED_BEHIND
        if not job.is_main and step.number > 1:
            kind = "saved" if is_behind else "plain"
            sys.stdout.write(f"step {now_s - ended_s:.4f} {kind}\nmicro-batch {median(computed_s):.5f} {kind}\n")
        ended_s = now_s
        if job.is_main and step.number in SAVED_BEHIND:
            save(model, optimizer, args.path)
    sys.stdout.flush()


main()
