"""A plain training loop, made elastic: the lines that differ from a loop without elastrain are marked with `#+`.

elastrain run --nproc-per-node 2 examples/plain_loop.py
"""

import argparse

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

import elastrain  # +


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Noisy samples of a sine: `(x, sin x)`, drawn from torch's default generator, which is seeded per sample."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(1) * 6 - 3
        return x, torch.sin(x) + 0.05 * torch.randn(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    steps = parser.parse_args().steps

    job = elastrain.init(seed=0)  # +
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, steps)
    # The global batch never changes, whoever is alive: 16 micro-batches of 4 samples, shared among the workers.
    loader = elastrain.DataLoader(Waves(), global_batch_size=64, micro_batch_size=4)  # +
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)  # +

    for step in job.steps(loader, until=steps):  # +
        for x, y in step:  # +
            step.backward(nn.functional.mse_loss(model(x), y))  # +
        scheduler.step()
        if job.rank == 0 and step.number % 10 == 0:
            print(f"step {step.number}: loss {step.loss:.4f}", flush=True)
    if job.rank == 0:
        print(f"digest {job.digest()}", flush=True)


if __name__ == "__main__":
    main()
