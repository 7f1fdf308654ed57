"""A script that evaluates before the first step, behind each step, and behind the loop. Members may be killed there."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import elastrain

arguments = argparse.ArgumentParser()
arguments.add_argument("--steps", type=int, default=3)
arguments.add_argument("--kill", default="", help="member that is killed in the evaluation behind step 1")
arguments.add_argument("--predict", action="store_true", help="gather outputs behind each step, too")
arguments.add_argument("--kill-predicting", default="", help="member that is killed in the outputs behind step 1")
arguments.add_argument("--raises", action="store_true", help="one sample is bad")
arguments.add_argument("--only-main", action="store_true", help="only rank 0 evaluates")
arguments.add_argument("--batch-s", type=float, default=0.0, help="seconds that each batch takes besides")
arguments.add_argument("--long-s", type=float, default=0.0, help="seconds that the only batch behind step 1 takes")
arguments.add_argument("--shorter-on", default="", help="member with a shorter dataset")
args = arguments.parse_args()

job = elastrain.init(seed=3)
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
inputs = torch.randn(203, 8, generator=torch.Generator().manual_seed(1))
samples = list(zip(inputs, inputs[:, :4].argmax(1), strict=True))
loader = elastrain.DataLoader(samples, global_batch_size=24, micro_batch_size=4, num_workers=0)
model, optimizer, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
found: list[dict[str, Any]] = []
gathered: list[str] = []
step: Any = SimpleNamespace(number=-1, is_committed=False)  # a newcomer may come behind the last one
computed = predicted = 0


def fn(batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
    global computed
    computed += 1
    if job.member == args.kill and step.number == 1 and step.is_committed:
        os.kill(os.getpid(), signal.SIGKILL)
    x, target = batch
    if args.raises and step.number == 1 and bool((x == inputs[100]).all(1).any()):
        raise ValueError("a bad sample")
    time.sleep(args.long_s if step.number == 1 and len(target) == 5 else args.batch_s)
    out = model(x)
    at = (target, out.argmax(1))
    return {
        "loss": nn.functional.cross_entropy(out, target, reduction="sum"),
        "correct": (out.argmax(1) == target).sum(),
        "samples": len(target),
        "likeliest": out.max().item(),
        "confusion": torch.zeros(4, 4).index_put_(at, torch.ones(len(target)), accumulate=True),
        "drawn": random.random() + float(torch.rand(())),
    }


def outputs(batch: tuple[Tensor, Tensor]) -> Any:
    global predicted
    predicted += 1
    if job.member == args.kill_predicting and step.number == 1 and predicted > 30 // job.world_size + 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(args.batch_s)
    return {"logits": (model(batch[0]).bfloat16(), None), "target": batch[1], "count": len(batch[1])}


def predict() -> None:
    """Note a digest of the outputs of all batches, in the order in which they came."""
    told = job.predict(outputs, samples, batch_size=7)
    assert torch.equal(torch.cat([each["target"] for each in told]), torch.stack([target for _, target in samples]))
    assert [each["count"] for each in told] == [7] * 29
    logits = torch.cat([each["logits"][0] for each in told])
    gathered.append(hashlib.sha256(logits.view(torch.int16).numpy().tobytes()).hexdigest()[:16])


def evaluate(of: list[tuple[Tensor, Tensor]]) -> None:
    if args.only_main and not job.is_main:
        return
    of = of[:-3] if job.member == args.shorter_on else of
    before = [each.clone() for each in model.buffers()], torch.get_rng_state(), random.getstate()
    sums = job.evaluate(fn, of, batch_size=7)
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.buffers(), strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2] == random.getstate()
    assert model.training
    found.append({name: value.tolist() if isinstance(value, Tensor) else value for name, value in sums.items()})


for step in job.steps(loader, until=args.steps):
    if step.number == 0:
        evaluate(samples)
    for x, target in step:
        step.backward(nn.functional.cross_entropy(model(x), target))
    evaluate(samples)
    evaluate(samples[:5])
    if args.predict:
        predict()
sys.stdout.write(f"{job.member} predicted {predicted} outputs {json.dumps(gathered[-2:])}\n")
evaluate(samples)
if len(found) > 1:  # a newcomer may have come behind the last step
    sys.stdout.write(f"{job.member} computed {computed} sums {json.dumps(found[-3:])}\n")
