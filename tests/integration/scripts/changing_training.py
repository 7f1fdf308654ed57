"""A training loop that changes buffers and switches of its model, with an optimizer that counts in its groups."""

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import elastrain

STEPS = 12


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 8)
        self.is_narrow, self.weights = False, [1.0, 2.0]
        self.register_buffer("mask", torch.ones(16))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) * self.mask * self.scale * (1 + self.steps / 100)
        hidden = hidden * torch.linspace(0, 1, 16) if self.is_narrow else hidden
        out: Tensor = self.head(hidden) * self.weights[0]
        return out


class Counting(torch.optim.Optimizer):
    """Momentum that is corrected by a counter in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    moment = self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                    p.add_(moment, alpha=-group["lr"] / (1 - 0.9 ** group["step"]))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slow-while", type=Path)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds behind each step, in which a checkpoint is written"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=0)
    model = Model()
    optimizer = Counting(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=60, cycle_momentum=False)
    gc.freeze()
    loader = elastrain.DataLoader(Samples(), global_batch_size=8, micro_batch_size=2, num_workers=0)
    model, optimizer, loader = job.prepare(model, optimizer, loader, elementwise=True)
    for step in job.steps(loader, until=STEPS):
        if step.number == 2:
            model.mask[:8] = 0
            model.is_narrow = True
            model.weights[0] = 0.5
            model.scale = torch.full((), 2.0)
        for x in step:
            if args.slow_while is not None and step.number >= 5 and args.slow_while.exists():
                time.sleep(1.0)
            step.backward(nn.functional.mse_loss(model(x), x))
        model.steps += 1
        scheduler.step()
        time.sleep(args.pause)
    state = float(model.mask.sum()), float(model.steps), float(model.scale), model.is_narrow, model.weights
    said = ["SAID", job.digest(), *state, optimizer.param_groups[0]["step"], scheduler.last_epoch]
    sys.stdout.write(" ".join(map(str, said)) + "\n")


if __name__ == "__main__":
    main()
