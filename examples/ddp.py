"""An existing DDP script: the backend has another name, and a step is an attempt that is made again after a loss.

elastrain run --nproc-per-node 2 --max-restarts 0 examples/ddp.py

Survivors go on with the same wrapped model. Unlike a job of `elastrain.init`, the batch of the dead is not computed
again, and nobody takes their place: so workers are not started again here.
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import elastrain.comm  # after it, torch knows the backend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int, default=-1, help="step in which the last rank ends itself, for a trial")
    args = parser.parse_args()

    dist.init_process_group("elastrain")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    samples = torch.Generator().manual_seed(dist.get_rank())
    last = dist.get_rank() == dist.get_world_size() - 1
    for step in range(args.steps):
        x = torch.randn(16, 8, generator=samples)
        for attempt in elastrain.comm.surviving(ddp, optimizer):
            with attempt:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(ddp(x), x.sum(dim=1, keepdim=True))
                if last and step == args.die_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()  # type: ignore[no-untyped-call]  # of torch
    total = sum(parameter.double().sum() for parameter in ddp.parameters())
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: parameters add up to {float(total):.17g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
