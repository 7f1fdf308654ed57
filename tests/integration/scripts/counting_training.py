"""A loop that counts what it trains on: in a dict that it may register, and in a dict that it never registers."""

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import nn

import elastrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--register", action="store_true")
    parser.add_argument("--slow-while", type=Path)
    chosen = parser.parse_args()
    job = elastrain.init(seed=1)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = elastrain.DataLoader(list(torch.ones(64, 4)), global_batch_size=16, micro_batch_size=4, num_workers=0)
    job.prepare(model, optimizer, loader)
    counts = {"samples": 0}
    if chosen.register:
        job.register("counts", counts)
    for step in job.steps(loader, until=chosen.steps):
        for batch in step:
            step.backward(model(batch).square().mean())
        counts["samples"] += step.samples
        if chosen.slow_while and chosen.slow_while.exists():  # a newcomer shall find something left to join
            time.sleep(0.4)
    sys.stdout.write(f"counted {counts['samples']} on {job.member}\n")


main()
