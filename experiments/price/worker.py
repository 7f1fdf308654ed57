"""One elastrain worker doing the common workload; leaves its measurement as `<out>/<member process>.json`.

The user's side of the API and the common measuring only; started by `run.py` through `elastrain run`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.baselines.workload import Measurement, Workload
from experiments.memory import MemoryAccount, Usage, own_memfd_bytes
from experiments.train_gpt.data import Windows
from experiments.train_gpt.model import build, next_token_loss
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw, cosine_with_warmup

KINDS = ("fp32", "bf16", "fp16", "batchnorm", "free")
"""`fp16` scales its losses; `free` is float32 with deterministic=False."""


class TokenBatchNorm(nn.BatchNorm1d):
    """In LayerNorm's place: normalises every feature over the tokens of the micro-batch."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.flatten(0, 1)).view_as(tokens)


def of_kind(model: nn.Module, kind: str) -> nn.Module:
    """`kind`, one of KINDS, as far as the model shows it."""
    if kind in ("bf16", "fp16"):
        return model.to(torch.bfloat16 if kind == "bf16" else torch.float16)
    if kind == "batchnorm":
        for name, norm in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.LayerNorm)]:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, TokenBatchNorm(norm.normalized_shape[0]))
    return model


def train(work: Workload, *, backups: int, run_length: int, kind: str, log: Path | None = None) -> Measurement:
    """Warm up, time, and weigh the last step. A step's time runs from the end of the one before to its own end.

    `log`: also count in every micro-batch, and log every step to this file.
    """
    account = MemoryAccount(external=own_memfd_bytes)
    more: dict[str, Any] = {"loss_scale": "dynamic"} if kind == "fp16" else {"deterministic": kind != "free"}
    job = elastrain.init(seed=work.seed, run_length=run_length, backups=backups, **more)
    loader = elastrain.DataLoader(
        Windows("train", context=work.context),
        global_batch_size=work.micro_batches * work.micro_batch_size,
        micro_batch_size=work.micro_batch_size,
        num_workers=0,  # as the peers load: in the training process
    )
    model = of_kind(build(work.size, seed=work.seed), kind)
    optimizer = adamw(model, lr=work.lr)
    scheduler = cosine_with_warmup(optimizer, warmup_steps=10, total_steps=1000)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=MAX_GRAD_NORM)
    if log is not None:
        job.loggers(elastrain.Jsonl(log))
    ends, cpu_ends, losses = [time.perf_counter()], [time.process_time()], []
    usage, resting = Usage(), None
    for index, step in enumerate(job.steps(loader, until=work.total_steps)):
        weighed = work.weigh and index == work.total_steps - 1
        if weighed:
            resting = account.live_bytes()
        with account.measure() if weighed else nullcontext(usage) as usage:
            for batch in step:
                loss = next_token_loss(model, batch)
                if log is not None:
                    step.add("micro_batches", 1)
                    step.add("loss", loss)
                step.backward(loss)
            scheduler.step()
        if log is not None:
            job.log(
                {"loss": step.loss, "sum": step.sums["loss"], "lr": scheduler.get_last_lr()[0], "epoch": step.epoch}
            )
        ends.append(time.perf_counter())
        cpu_ends.append(time.process_time())
        losses.append(float(step.loss))
    timed = slice(work.warmup_steps, work.warmup_steps + work.steps)
    return Measurement(
        step_s=[end - start for start, end in pairwise(ends)][timed],
        cpu_s=[end - start for start, end in pairwise(cpu_ends)][timed],
        losses=losses,
        peak_bytes=usage.peak_bytes if work.weigh else None,
        resting_bytes=resting,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=json.loads, required=True, help="the fields of Workload, as JSON")
    parser.add_argument("--backups", type=int, required=True)
    parser.add_argument("--run-length", type=int, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--log", type=Path, help="count, and log every step to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    options = {"backups": args.backups, "run_length": args.run_length, "kind": args.kind, "log": args.log}
    found = train(Workload(**args.work), **options)
    (args.out / f"{os.getpid()}.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main()
