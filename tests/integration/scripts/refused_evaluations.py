"""Evaluations that are refused, one after another, in a job of one. Each sentence is printed, and training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import elastrain

job = elastrain.init(seed=3)
model = nn.Linear(4, 2)
samples = [torch.ones(4) * i for i in range(12)]
loader = elastrain.DataLoader(samples, global_batch_size=4, micro_batch_size=2, num_workers=0)
model, optimizer, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)


def fine(batch: Any) -> dict[str, Any]:
    return {"sum": model(batch).sum()}


def refused(name: str, fn: Callable[[Any], Any] = fine, dataset: Any = samples, batch_size: Any = 3) -> None:
    try:
        job.evaluate(fn, dataset, batch_size=batch_size)
    except elastrain.ConfigError as error:
        sys.stdout.write(f"{name}: {error}\n")
    else:
        sys.stdout.write(f"{name}: not refused\n")


def nested(batch: Any) -> dict[str, Any]:
    return job.evaluate(fine, samples, batch_size=2)


def other_names(batch: Any) -> dict[str, Any]:
    return {"first" if float(batch[0, 0]) == 0 else "rest": 1}


refused("before the loop")
for step in job.steps(loader, until=2):
    if step.number == 0:
        refused("no function", fn=3)  # type: ignore[arg-type]
        refused("stream", dataset=iter(samples))
        refused("empty", dataset=[])
        refused("batch size", batch_size=0)
        refused("no dict", fn=lambda batch: model(batch).sum())
        refused("no number", fn=lambda batch: {"what": "much"})
        refused("too many", fn=lambda batch: {"all": torch.zeros(1 << 17)})
        refused("nested", fn=nested)
        refused("other names", fn=other_names)
    for batch in step:
        if step.number == 0:
            refused("in a step")
        step.backward(model(batch).square().mean())
sys.stdout.write(f"sums {job.evaluate(fine, samples, batch_size=5)['sum']!r}\n")
