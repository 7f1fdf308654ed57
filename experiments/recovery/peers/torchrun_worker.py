"""DDP on Gloo under torchrun, which restarts everybody after a loss; the last step's state lies in shared memory."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from experiments.recovery.peers.worker import Trainer, share_of
from experiments.train_gpt.model import build
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw


def main() -> None:
    sys.argv += ["--rank", os.environ["RANK"]]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--checkpoint-every-s", type=float, default=0.0, help="at the ends of steps; 0: of each")
    share, args = share_of(parser)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo")
    module = build(share.work.size, seed=share.work.seed)
    optimizer = adamw(module, lr=share.work.lr)
    step = restore(args.checkpoint, module, optimizer)
    trainer = Trainer(share, module)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    saved_s = time.monotonic()
    while True:  # until it is killed
        optimizer.zero_grad(set_to_none=False)
        trainer.accumulate(model, step, model.no_sync)
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if share.rank == 0 and time.monotonic() >= saved_s + args.checkpoint_every_s:
            save(args.checkpoint, module, optimizer, step + 1)
            saved_s = time.monotonic()
        trainer.stepped(step)
        step += 1


def save(path: Path, module: nn.Module, optimizer: Optimizer, step: int) -> None:
    state = {"module": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def restore(path: Path, module: nn.Module, optimizer: Optimizer) -> int:
    """The step to go on with."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    module.load_state_dict(state["module"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
