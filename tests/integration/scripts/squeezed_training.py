"""Dropout and AdamW; by default activations larger than the model: something to move. Prints the end's digest."""

import argparse
import functools
import itertools
import sys

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 1024

    @functools.cache  # noqa: B019  the one data set of the process
    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(64, generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--micro-batch-size", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3)
    sizes = [64, *[args.width] * args.layers, 64]
    layers = [nn.Sequential(nn.Linear(a, b), nn.GELU(), nn.Dropout(0.1)) for a, b in itertools.pairwise(sizes)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = elastrain.DataLoader(
        Samples(), global_batch_size=8 * args.micro_batch_size, micro_batch_size=args.micro_batch_size
    )
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            step.backward(nn.functional.mse_loss(model(inputs), inputs))
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
