"""DDP with ZeroRedundancyOptimizer: optimizer state sharded over the members, the peer for memory per member.

Settings: as DDP, and `parameters_as_bucket_view=True` (parameters are broadcast without a second copy); fused AdamW.
"""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from experiments.baselines.ddp import DDPTrainer, train_in_group
from experiments.baselines.workload import Barrier, Measurement, Place, Workload, command_line, run_members
from experiments.train_gpt.model import GPT, decay_groups


class Zero1Trainer(DDPTrainer):
    """The DDP loop with the optimizer state of each parameter on one member."""

    def make_optimizer(self, model: GPT, work: Workload) -> Optimizer:
        return ZeroRedundancyOptimizer(
            decay_groups(model, weight_decay=0.1),
            optimizer_class=torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=work.lr,
            betas=(0.9, 0.95),
            fused=True,
        )


def member(work: Workload, place: Place, start: Barrier) -> Measurement:
    return train_in_group(work, place, start, Zero1Trainer)


def run(work: Workload, members: int) -> list[Measurement]:
    """One job of `members` processes on this host."""
    return run_members(work, member, members=members)


if __name__ == "__main__":
    command_line(__doc__, run)
