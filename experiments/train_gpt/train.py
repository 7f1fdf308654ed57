"""Train the GPT with elastrain: under `elastrain run`, or alone under `python` as a job of one.

Only the user's side of the API comes in here; this file is what a user's training script looks like.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.train_gpt.data import Windows
from experiments.train_gpt.model import SIZES, build, next_token_loss
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw, cosine_with_warmup, held_out_loss


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps in all")
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backups", type=int, default=1, help="spare copies of each optimizer shard")
    parser.add_argument("--run-length", type=int, default=2, help="consecutive micro-batches summed in place")
    parser.add_argument("--global-batch-size", type=int, default=128)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    job = elastrain.init(seed=args.seed, run_length=args.run_length, backups=args.backups)
    context = SIZES[args.size].context
    loader = elastrain.DataLoader(
        Windows("train", context=context),
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
    )
    model = build(args.size, seed=args.seed)
    optimizer = adamw(model, lr=args.lr)
    scheduler = cosine_with_warmup(optimizer, warmup_steps=args.warmup_steps, total_steps=args.steps)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=MAX_GRAD_NORM)
    for step in job.steps(loader, until=args.steps):
        for batch in step:
            step.backward(next_token_loss(model, batch))
        scheduler.step()
        if job.rank == 0:
            print(f"step {step.number:5d}  loss {step.loss:.4f}", flush=True)
    if job.rank == 0:
        print(f"held-out loss {held_out_loss(model, context=context):.4f}", flush=True)


if __name__ == "__main__":
    main()
