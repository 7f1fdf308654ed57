"""The script under `elastrain run`: the GPT that the peers train, each micro-batch with the same wait beside it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.baselines.workload import Workload
from experiments.train_gpt.data import Windows
from experiments.train_gpt.model import build, next_token_loss
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--pace-s", type=float, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    work = Workload(micro_batch_size=args.micro_batch_size, micro_batches=args.micro_batches)
    torch.set_num_threads(1)
    job = elastrain.init(seed=work.seed, run_length=2)
    loader = elastrain.DataLoader(
        Windows("train", context=work.context),
        global_batch_size=work.micro_batches * work.micro_batch_size,
        micro_batch_size=work.micro_batch_size,
    )
    model = build(work.size, seed=work.seed)
    optimizer = adamw(model, lr=work.lr)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=MAX_GRAD_NORM)
    for step in job.steps(loader, until=args.steps):
        for batch in step:
            time.sleep(args.pace_s)
            step.backward(next_token_loss(model, batch))


if __name__ == "__main__":
    main()
