"""Training of a small model that torch.compile has built, on the CPU or a test device, with lines about what it built.

Each process writes `<member>.json` into the folder `--counts` at the end of its loop: its node, and how often inductor
found a graph in its cache or missed it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import elastrain

WORDS, LENGTH, WIDTH = 37, 8, 16


class Block(nn.Module):
    """A block whose forward draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.wide(self.norm(x)))
        return x + functional.dropout(self.narrow(hidden), 0.1, self.training)


class Model(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


class Words(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))


def on_device(model: nn.Module, device: str) -> nn.Module:
    """Return the model on its device. Ties and parameters stay the same objects."""
    if device == "late":
        from tests.support import late

        late.install()
        late.keep_from_compiler()
        torch.__future__.set_swap_module_params_on_conversion(True)
    return model.to(device)


def hold_up(slow: Path | None, step: int) -> None:
    """Wait for each micro-batch while the file exists: longer once a member has been lost."""
    until_s = time.monotonic() + (0.2 if step < 4 else 1.0)
    while slow is not None and slow.exists() and time.monotonic() < until_s:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--what", choices=["model", "blocks", "nothing"], default="blocks")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--slow-while", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3)
    model = on_device(Model(), args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastrain.DataLoader(Words(), global_batch_size=12, micro_batch_size=2)
    if args.what == "model":
        model.compile(backend=args.backend)
    if args.what == "blocks":
        for block in model.blocks:
            block.compile(backend=args.backend)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=args.steps):
        for words in step:
            hold_up(args.slow_while, step.number)
            step.backward(model(words.to(args.device)))
    if args.counts is not None:
        _count(args.counts)
    sys.stderr.write(f"digest {job.digest()}\n")


def _count(folder: Path) -> None:
    from torch._dynamo.utils import counters

    member = os.environ.get("ELASTRAIN_MEMBER", "alone")
    told = {"node": os.environ.get("ELASTRAIN_NODE"), "graphs": counters["stats"]["unique_graphs"]}
    told |= {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
    (folder / f"{member}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
