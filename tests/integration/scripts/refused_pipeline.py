"""A stack for pipelines that does, by `--case`, one thing that pipelines refuse. Otherwise it is an ordinary script."""

import argparse
import os

import torch
from torch import Tensor, nn

import elastrain

ME = os.environ.get("ELASTRAIN_MEMBER", "alone")
WIDTH = 16


class Cache:
    """Keeps what blocks have made, for later blocks."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        made = x + torch.tanh(self.linear(x))
        if cache is not None:
            cache.kept.append(made)
            made = made + cache.kept[0]
        return made


class Model(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.case = case
        if case == "parameter":
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        cache = Cache() if self.case == "cache" else None
        losses = [x.square().mean()]
        order = list(self.layers)
        if self.case == "graph" and ME == "m1":
            order[1], order[2] = order[2], order[1]
        for layer in order:
            x = layer(x, cache)
            losses.append(x.square().mean())
            if self.case == "values" and x.sum() > 0:
                x = -x
        y: Tensor = self.out(x)
        if self.case == "losses":
            y = y + sum(losses)
        if self.case == "skip":
            y = y + losses[0]
        if self.case == "more":
            y = y + losses[2]
        return y * self.scale if self.case == "parameter" else y


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=1, stages=5 if args.case == "wish" and ME == "m1" else None)
    model = Model(args.case)
    loader = elastrain.DataLoader(Samples(), global_batch_size=8, micro_batch_size=2, num_workers=0)
    prepared, _, loader = job.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    forward = torch.compile(prepared, backend="eager") if args.case == "compiled" else prepared
    for step in job.steps(loader, until=3):
        for inputs in step:
            loss = nn.functional.mse_loss(forward(inputs), inputs)
            if args.case == "item":
                job.register("seen", [loss.item()])
            step.backward(loss)
        if args.case == "outside" and step.number == 1:
            for layer in model.layers:
                layer(torch.ones(1, WIDTH))
        if args.case == "state" and step.number == 1:
            [model.get_submodule(name).state_dict() for name in ("into", "layers.0", "layers.3", "out")]
    job.digest()


if __name__ == "__main__":
    main()
