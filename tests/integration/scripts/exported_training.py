"""A model with all that an export has to get right: a tied weight, running statistics, a frozen bias, a buffer.

Saves what it has at its end, from plain PyTorch's side, into the file that is its argument.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import elastrain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(50, 16)
        self.norm = nn.BatchNorm1d(16)
        self.body = nn.Linear(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.emb.weight
        self.body.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(self.norm(self.emb(x)))) * self.scale
        return found


class Pairs(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(0, 50, (2,), generator=torch.Generator().manual_seed(index))


def main() -> None:
    job = elastrain.init(seed=0)
    torch.manual_seed(0)
    loader = elastrain.DataLoader(Pairs(), global_batch_size=32, micro_batch_size=4)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=6):
        for batch in step:
            step.backward(nn.functional.cross_entropy(model(batch[:, 0]), batch[:, 1]))
    if job.rank == 0:
        torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
