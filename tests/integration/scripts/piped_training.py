"""A stack with activations that are worth moving, one layer frozen, two tied: for pipelines with memory limits.

Prints the end's digest. It knows nothing of pipelines: alone under `python` it is the job of one.
"""

import argparse
import functools
import sys

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[Tensor]):
    """`rows` of 64 numbers each: what a loader does for every sample takes longer than to compute with a single row."""

    def __init__(self, rows: int = 1) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 4096 // self.rows

    @functools.cache  # noqa: B019  the one data set of the process
    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(self.rows, 64, generator=torch.Generator().manual_seed(index)).squeeze(0)


class Layer(nn.Module):
    """Residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(nn.functional.gelu(self.linear(x)))


class Model(nn.Module):
    """The third layer is frozen; the last but one shares its weights with the second."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.into = nn.Linear(64, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.out = nn.Linear(width, 64)
        self.layers[2].requires_grad_(False)
        self.layers[-2].linear.weight = self.layers[1].linear.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.out(hidden)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batch-size", type=int, default=257)
    parser.add_argument("--rows", type=int, default=1, help="of each sample")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3)
    model = Model(args.width, args.layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loader = elastrain.DataLoader(
        Samples(args.rows), global_batch_size=6 * args.micro_batch_size, micro_batch_size=args.micro_batch_size
    )
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
