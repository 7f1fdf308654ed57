"""A script that trains one step, evaluates, and prints how long the evaluation took and what it came to."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import elastrain


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=16384)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--kill", default="", help="member that is killed after 10 batches")
    options = parser.parse_args()
    job = elastrain.init(seed=5, backups="all")
    width = options.width
    model = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10))
    inputs = torch.randn(options.samples, 64, generator=torch.Generator().manual_seed(1))
    samples = list(zip(inputs, inputs[:, :10].argmax(1), strict=True))
    loader = elastrain.DataLoader(samples, global_batch_size=16, micro_batch_size=4, num_workers=0)
    model, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader)
    computed = 0

    def fn(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        nonlocal computed
        computed += 1
        if job.member == options.kill and computed == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        x, target = batch
        for _ in range(8):  # a batch of a larger model takes as long
            out = model(x)
        loss = nn.functional.cross_entropy(out, target, reduction="sum")
        return {"loss": loss, "right": (out.argmax(1) == target).sum(), "samples": len(target)}

    for step in job.steps(loader, until=1):
        for x, target in step:
            step.backward(nn.functional.cross_entropy(model(x), target))
        began_s = time.monotonic()
        sums = job.evaluate(fn, samples, batch_size=options.batch_size)
        took_s = time.monotonic() - began_s
        sys.stdout.write(f"evaluated {took_s:.4f} {json.dumps(sums, sort_keys=True)}\n")
    sys.stdout.write(f"digest {job.digest()}\n")
    sys.stdout.flush()


main()
