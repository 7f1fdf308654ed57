"""DistributedDataParallel on Gloo with `no_sync` accumulation, set up as PyTorch recommends for a fixed set of members.

Settings: `gradient_as_bucket_view=True` (no second copy of the gradients), default 25 MiB buckets, no search for unused
parameters; gradients are zeroed in place, so that they stay views of the buckets; loopback interface.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from experiments.baselines.workload import (
    Barrier,
    Batch,
    Measurement,
    Place,
    Workload,
    command_line,
    measure,
    member_share,
    run_members,
)
from experiments.memory import MemoryAccount
from experiments.train_gpt.model import GPT, build, next_token_loss
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw, cosine_with_warmup


class DDPTrainer:
    """The plain loop behind DDP; `make_optimizer` is what ZeRO replaces."""

    def __init__(self, work: Workload) -> None:
        torch.manual_seed(work.seed + dist.get_rank())
        model = build(work.size, seed=work.seed)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        self.optimizer = self.make_optimizer(model, work)
        self.scheduler = cosine_with_warmup(self.optimizer, warmup_steps=10, total_steps=1000)

    def make_optimizer(self, model: GPT, work: Workload) -> Optimizer:
        return adamw(model, lr=work.lr)

    def step(self, batches: Sequence[Batch]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        total = torch.zeros(())
        for batch in batches:
            with nullcontext() if batch is batches[-1] else self.model.no_sync():
                loss = next_token_loss(self.model, batch) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self.optimizer.step()
        self.scheduler.step()
        return total


def train_in_group(work: Workload, place: Place, start: Barrier, trainer: type[DDPTrainer]) -> Measurement:
    """One member's run inside a Gloo group of `place.members`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    account = MemoryAccount()
    store = FileStore(str(place.folder / "store"), place.members)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.members)
    try:
        share = member_share(work.micro_batches, rank=place.rank, members=place.members)
        return measure(work, trainer, share=share, start=start, account=account)
    finally:
        dist.destroy_process_group()


def member(work: Workload, place: Place, start: Barrier) -> Measurement:
    return train_in_group(work, place, start, DDPTrainer)


def run(work: Workload, members: int) -> list[Measurement]:
    """One DDP job of `members` processes on this host."""
    return run_members(work, member, members=members)


if __name__ == "__main__":
    command_line(__doc__, run)
