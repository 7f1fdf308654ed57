"""Training of a small model that torch.compile has built, on the CPU or a test device, with lines about what it built.

Each process writes `<member>.json` into the folder `--counts` at the end of its loop: its node, and how often inductor
found a graph in its cache or missed it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import elastrain

WORDS, LENGTH, WIDTH = 37, 8, 16


class Block(nn.Module):
    """A block whose forward draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


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


def capture_blocks(model: Any, device: str) -> None:
    """Let the MLP of each block replay graphs of its forward and backward."""
    for block in model.blocks:
        sample = torch.zeros(2, LENGTH, WIDTH, device=device).requires_grad_()
        torch.get_device_module(device).make_graphed_callables(block.mlp, (sample,))


def hold_up(slow: Path | None, step: int) -> None:
    """Wait for each micro-batch while the file exists: longer once a member has been lost."""
    until_s = time.monotonic() + (0.2 if step < 4 else 1.0)
    while slow is not None and slow.exists() and time.monotonic() < until_s:
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument(
        "--what", choices=["model", "blocks", "graphs", "early graphs", "captured", "nothing"], default="blocks"
    )
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--counts", type=Path)
    parser.add_argument("--slow-while", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3)
    model: Any = on_device(Model(), args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = elastrain.DataLoader(Words(), global_batch_size=12, micro_batch_size=2)
    if args.what == "model":
        model.compile(backend=args.backend)
    if args.what == "blocks":
        for block in model.blocks:
            block.compile(backend=args.backend)
    if args.what == "early graphs":
        capture_blocks(model, args.device)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    if args.what == "graphs":
        capture_blocks(model, args.device)
    for step in job.steps(loader, until=args.steps):
        for words in step:
            hold_up(args.slow_while, step.number)
            with torch.autocast(args.device, torch.bfloat16, enabled=args.autocast):
                loss, capturing = model(words.to(args.device)), contextlib.nullcontext()
            if args.what == "captured":
                device = torch.get_device_module(args.device)
                capturing = device.graph(device.CUDAGraph())
            with capturing:
                step.backward(loss)
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
