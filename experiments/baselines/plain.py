"""The plain PyTorch accumulation loop that price_1 is measured against: fused AdamW, clipping, no wrapper at all.

With several members these are independent processes, each doing the whole step: what the machine itself allows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from experiments.baselines.workload import (
    Barrier,
    Batch,
    Measurement,
    Place,
    Workload,
    command_line,
    measure,
    run_members,
)
from experiments.memory import MemoryAccount
from experiments.train_gpt.model import build, next_token_loss
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw, cosine_with_warmup


class PlainTrainer:
    """A model, an optimizer, a loop."""

    def __init__(self, work: Workload) -> None:
        torch.manual_seed(work.seed)
        self.model = build(work.size, seed=work.seed)
        self.optimizer = adamw(self.model, lr=work.lr)
        self.scheduler = cosine_with_warmup(self.optimizer, warmup_steps=10, total_steps=1000)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for batch in batches:
            loss = next_token_loss(self.model, batch) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.scheduler.step()
        return total


def member(work: Workload, place: Place, start: Barrier) -> Measurement:
    """One independent process over all micro-batches of the step."""
    return measure(work, PlainTrainer, share=range(work.micro_batches), start=start, account=MemoryAccount())


def run(work: Workload, members: int = 1) -> list[Measurement]:
    """`members` independent loops at the same time."""
    return run_members(work, member, members=members)


if __name__ == "__main__":
    command_line(__doc__, run)
