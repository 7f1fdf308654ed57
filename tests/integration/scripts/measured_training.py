"""Models of three kinds, most of whose memory is parameters: what members hold is compared with what is stated."""

import argparse
import itertools
import sys

import torch
from torch import Tensor, nn

import elastrain


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.wide = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, inputs: Tensor) -> Tensor:
        seen = self.before(inputs)
        inputs = inputs + self.attention(seen, seen, seen, need_weights=False)[0]
        return inputs + self.wide(self.between(inputs))


class Text(nn.Module):
    """A small GPT. `tied`: its embedding and its last layer are one tensor. `frozen`: half of its blocks stay."""

    def __init__(self, *, tied: bool, frozen: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        self.blocks = nn.Sequential(*(Block(512) for _ in range(4)))
        self.last = nn.Linear(512, 4096, bias=False)
        if tied:
            self.last.weight = self.embedding.weight
        if frozen:
            self.blocks[:2].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(self.blocks(self.embedding(tokens)))


def images() -> nn.Module:
    widths = [3, 256, 512, 512, 512]
    layers = [
        nn.Sequential(nn.Conv2d(a, b, 3, padding=1, stride=2), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(widths)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS = {
    "gpt": lambda: Text(tied=False, frozen=False),
    "conv": images,
    "frozen": lambda: Text(tied=True, frozen=True),
}


class Samples(torch.utils.data.Dataset[Tensor]):
    def __init__(self, kind: str) -> None:
        self._kind = kind

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        if self._kind == "conv":
            return torch.randn(3, 16, 16, generator=generator)
        return torch.randint(4096, (16,), generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backups", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, backups=args.backups)
    model = MODELS[args.kind]()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    loader = elastrain.DataLoader(Samples(args.kind), global_batch_size=8, micro_batch_size=2)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for inputs in step:
            told = model(inputs)
            loss = (
                told.square().mean()
                if args.kind == "conv"
                else nn.functional.cross_entropy(told[:, :-1].flatten(0, 1), inputs[:, 1:].flatten())
            )
            step.backward(loss)
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
