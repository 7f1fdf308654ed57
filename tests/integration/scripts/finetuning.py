"""Fine-tuning: most of a pretrained model stays as it is.

`ends` freezes the embedding, the last block, and the weight (but not the bias) of a layer; `adapters` freezes all
and trains low-rank adapters beside the frozen weights, in bfloat16.
"""

import argparse
import sys
import time

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random words: seeded per sample by the loader."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, 32, (6,)), torch.randint(0, 32, ())


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 24)
        self.norm = nn.BatchNorm1d(24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        self.head = nn.Linear(24, 32)

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.norm(self.embedding(words).mean(1))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        out: Tensor = self.head(hidden)
        return out.float()


def pretrained(kind: str) -> Model:
    model = Model()
    if kind == "ends":
        model.embedding.requires_grad_(False)
        model.head.requires_grad_(False)
        model.layers[1][0].weight.requires_grad_(False)
        return model.double()
    model.requires_grad_(False)
    for layer in model.layers:
        layer[0] = Adapted(layer[0], rank=2)
    return model.to(torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--model", choices=["ends", "adapters"], required=True)
    parser.add_argument("--linger", type=int, default=0, help="go slowly after step 10 while there are fewer members")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=5)
    model = pretrained(args.model)
    frozen = {name: q.clone() for name, q in model.named_parameters() if not q.requires_grad}
    optimizer = torch.optim.AdamW((q for q in model.parameters() if q.requires_grad), lr=1e-2)
    loader = elastrain.DataLoader(Samples(), global_batch_size=36, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for words, labels in step:
            loss = nn.functional.cross_entropy(model(words), labels)
            step.backward(loss, weight=(labels != 0).sum())
        if step.number >= 10 and job.world_size < args.linger:
            time.sleep(2.0)
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items()), "what is frozen has not moved"
    sys.stderr.write(f"frozen {len(frozen)} of {len(now)}\n")


if __name__ == "__main__":
    main()
