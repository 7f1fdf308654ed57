"""A stack whose layers all read what the first one made, so that no cut between them is legal."""

import sys

import torch
from torch import Tensor, nn

import elastrain

WIDTH, STEPS = 16, 3


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        losses = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            losses.append(x.square().mean())
        return x.square().mean() + sum(losses)


def main() -> None:
    torch.set_num_threads(1)
    job = elastrain.init(seed=3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = elastrain.DataLoader(Samples(), global_batch_size=8, micro_batch_size=2)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=STEPS):
        for inputs in step:
            step.backward(model(inputs))
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
