"""A small network whose micro-batches depend, on request, on what was computed before them."""

import argparse
import os
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, carries: str) -> None:
        self.generator = np.random.default_rng(0) if carries == "dataset" else None

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> Tensor:
        drawn = 0.0 if self.generator is None else float(self.generator.random())
        return torch.randn(8) + drawn


class Model(nn.Module):
    def __init__(self, carries: str) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(16, 1)
        self.carries = carries
        self.generator = torch.Generator().manual_seed(0)
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.entry(inputs))).tanh()
        if self.carries == "generator":
            hidden = hidden + torch.randn(hidden.shape, generator=self.generator)
        if self.carries == "counter":
            self.calls += 1
            hidden = hidden / self.calls
        if self.carries == "member":
            hidden = hidden * (1.0 + 2.0**-20 * (os.environ.get("ELASTRAIN_MEMBER") == "m1"))
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--carries", default="nothing")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--every", type=int, default=0)
    parser.add_argument("--deterministic", type=int, default=1)
    parser.add_argument("--linger", type=int, default=0, help="go slowly after step 10 while there are fewer members")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, deterministic=bool(args.deterministic), cross_check_every=args.every)
    loader = elastrain.DataLoader(Samples(args.carries), global_batch_size=14, micro_batch_size=2)
    model = Model(args.carries)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    state = torch.zeros(())
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            loss = model(inputs).square().mean()
            if args.carries == "loop":
                loss, state = loss + 0.1 * state * loss, loss.detach()
            step.backward(loss)
        if step.number >= 10 and job.world_size < args.linger:
            time.sleep(1.0)
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
