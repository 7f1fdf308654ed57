"""What training loops do besides micro-batches: draw numbers, change layers and rates, move a mean teacher."""

import argparse
import copy
import random
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

import elastrain
from elastrain.snapshot.digest import digest


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 8)
        self.temperature = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(torch.tanh(self.norm(self.entry(x))))) / self.temperature
        return out


@torch.no_grad()
def move(teacher: nn.Module, model: nn.Module) -> None:
    """Towards the model, by half of what is usual: a step that is moved twice shows."""
    for mine, its in zip(teacher.parameters(), model.parameters(), strict=True):
        mine.data.mul_(0.9).add_(its.data, alpha=0.1)
    for mine, its in zip(teacher.buffers(), model.buffers(), strict=True):
        mine.copy_(its)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--linger", type=int, default=0, help="go slowly after step 10 while there are fewer members")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=5)
    model = Model()
    teacher = copy.deepcopy(model).requires_grad_(False).eval()
    drawn, history = {"count": np.int64(0)}, torch.zeros(3, dtype=torch.bfloat16)
    job.register("teacher", teacher)
    job.register("drawn", drawn)
    job.register("history", history)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = elastrain.DataLoader(Samples(), global_batch_size=36, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=args.steps):
        scale = random.choice([0.5, 1.0, 2.0]) + float(np.random.rand()) + float(torch.rand(()))
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step.number)
        if step.number == 3:
            model.drop.p, model.temperature = 0.4, 2.0
            model.entry.weight.requires_grad_(False)
            model.norm.eval()
        for x in step:
            with torch.no_grad():
                goal = teacher(x)
            step.backward(nn.functional.mse_loss(model(x * scale), goal + x))
        if step.number == args.steps - 3:
            model.entry.weight.requires_grad_(True)
        move(teacher, model)
        drawn["count"] += int(random.randint(0, 9) + np.random.randint(0, 9) + torch.randint(0, 9, ()))
        history.copy_(torch.tensor([step.loss, step.grad_norm, float(scale)]))
        if step.number >= 10 and job.world_size < args.linger:
            time.sleep(2.0)
    told = [digest(value) for value in (*teacher.state_dict().values(), history)]
    sys.stderr.write(f"besides the model: {hash(tuple(told))} {drawn['count']}\n")


if __name__ == "__main__":
    main()
