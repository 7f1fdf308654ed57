"""GPT `small` in one pipeline of two: under elastrain, or with torch's `Schedule1F1B` on Gloo.

Writes a line per step: its length, and the processor time of all threads of this process, in seconds.

    elastrain run --nproc-per-node 2 --stages 2 experiments/pipeline/gpt.py --steps 6
    RANK=0 WORLD_SIZE=2 MASTER_ADDR=… python experiments/pipeline/gpt.py --steps 6 --first-of-second 3

Both train the same model on the same number of random tokens, cut before the same block, with the same optimizer; the
weight that embedding and head share has one gradient in both.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if __name__ == "__main__":  # as a script: make `elastrain` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.train_gpt.model import GPT, SIZES, build, next_token_loss

SIZE, MICRO_BATCHES, MICRO_BATCH, WORDS = "small", 8, 1, 256
LENGTH = SIZES[SIZE].context


class Texts(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random tokens, seeded per sample by the loader."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(0, WORDS, (LENGTH + 1,))
        return words[:-1], words[1:]


class FirstHalf(nn.Module):
    """Embedding and the blocks before the cut."""

    def __init__(self, model: GPT, cut: int) -> None:
        super().__init__()
        self.embedding, self.position, self.dropout = model.embedding, model.position, model.dropout
        self.blocks = model.blocks[:cut]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens) + self.position(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return x  # type: ignore[no-any-return]


class SecondHalf(nn.Module):
    """The blocks behind the cut, and the head."""

    def __init__(self, model: GPT, cut: int) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = model.blocks[cut:], model.norm, model.head

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def elastic(steps: int, run_length: int, lines: Any) -> None:
    """The unchanged loop."""
    import elastrain

    job = elastrain.init(seed=3, backups=0, run_length=run_length)
    model = build(SIZE, seed=3)
    loader = elastrain.DataLoader(
        Texts(), global_batch_size=MICRO_BATCHES * MICRO_BATCH, micro_batch_size=MICRO_BATCH, num_workers=0
    )
    model, _, loader = job.prepare(model, optimizer_of(model), loader)
    began = _now()
    for step in job.steps(loader, until=steps):
        for batch in step:
            step.backward(next_token_loss(model, batch))
        began = _tell(lines, began)


def torch_pipelining(steps: int, cut: int, lines: Any) -> None:
    """1F1B of `torch.distributed.pipelining`, this process's stage."""
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    dist.init_process_group("gloo")
    rank, cpu = dist.get_rank(), torch.device("cpu")
    whole = build(SIZE, seed=3)
    half = FirstHalf(whole, cut) if rank == 0 else SecondHalf(whole, cut)
    shared = whole.embedding.weight
    optimizer = optimizer_of(half)
    stage = PipelineStage(half, rank, 2, cpu)
    schedule = Schedule1F1B(
        stage, MICRO_BATCHES, loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten())
    )
    torch.manual_seed(3)
    began = _now()
    for _ in range(steps):
        words = torch.randint(0, WORDS, (MICRO_BATCHES * MICRO_BATCH, LENGTH + 1))
        if rank == 0:
            schedule.step(words[:, :-1])
        else:
            schedule.step(target=words[:, 1:], losses=[])
        assert shared.grad is not None
        dist.all_reduce(shared.grad)
        optimizer.step()
        optimizer.zero_grad()
        began = _tell(lines, began)
    dist.destroy_process_group()


def _now() -> tuple[float, float]:
    return time.monotonic(), time.process_time()


def _tell(lines: Any, began: tuple[float, float]) -> tuple[float, float]:
    now = _now()
    lines.write(f"{now[0] - began[0]!r} {now[1] - began[1]!r}\n")
    return now


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--first-of-second", type=int, help="the first block behind the cut; None: under elastrain")
    parser.add_argument("--run-length", type=int, default=1, help="under elastrain: micro-batches summed in place")
    args = parser.parse_args()
    torch.set_num_threads(1)
    me = os.environ.get("ELASTRAIN_MEMBER") or os.environ["RANK"]
    with (Path(os.environ["ELASTRAIN_RUN_DIR"]) / f"seconds-{me}.txt").open("w") as lines:
        if args.first_of_second is None:
            elastic(args.steps, args.run_length, lines)
        else:
            torch_pipelining(args.steps, args.first_of_second, lines)


if __name__ == "__main__":
    main()
