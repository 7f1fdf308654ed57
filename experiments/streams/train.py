"""A small training on streams, which writes the numbers of the samples of each micro-batch that it computes."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from torch import nn

import elastrain

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from experiments.streams.sources import collate, source


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--read", type=Path, required=True)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    job = elastrain.init(seed=11, backups="all")
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    loader = elastrain.DataLoader(
        source(options.source, options.folder, options.streams),
        global_batch_size=2 * options.micro_batches,
        micro_batch_size=2,
        streams=options.streams,
        num_workers=options.num_workers,
        collate_fn=collate,
    )
    model, _, loader = job.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01), loader)
    options.read.mkdir(parents=True, exist_ok=True)
    with (options.read / str(os.getpid())).open("w") as read:
        for step in job.steps(loader, until=options.steps):
            for numbers, inputs in step:
                loss = model(inputs).square().mean()
                read.write(f"{step.number} {step.micro_batch} {','.join(map(str, numbers.tolist()))};\n")
                read.flush()
                step.backward(loss)
    print(f"digest {job.digest()}", flush=True)


main()
