"""One replica under TorchFT: a replica group of one worker, gradients averaged over the replicas that are there."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

import torchft
from torch._C._distributed_c10d import TCPStore
from torch.nn.utils import clip_grad_norm_

from experiments.recovery.peers.worker import Trainer, share_of
from experiments.train_gpt.model import build
from experiments.train_gpt.schedule import MAX_GRAD_NORM, adamw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--host", default="127.0.0.1", help="this replica's address")
    parser.add_argument("--timeout-s", type=float, help="of a collective; default: TorchFT's")
    parser.add_argument("--heartbeat-s", type=float, help="between two heartbeats; default: TorchFT's")
    share, args = share_of(parser)
    module = build(share.work.size, seed=share.work.seed)
    inner = adamw(module, lr=share.work.lr)

    def state_dict() -> dict[str, Any]:
        return {"module": module.state_dict(), "optimizer": inner.state_dict()}

    def load_state_dict(state: dict[str, Any]) -> None:
        module.load_state_dict(state["module"])
        inner.load_state_dict(state["optimizer"])

    store = TCPStore(args.host, 0, is_master=True, wait_for_workers=False)
    timeout = {} if args.timeout_s is None else {"timeout": timedelta(seconds=args.timeout_s)}
    heartbeat = {} if args.heartbeat_s is None else {"heartbeat_interval": timedelta(seconds=args.heartbeat_s)}
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(**timeout),
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr=args.host,
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica_{share.rank}",
        hostname=args.host,
        **timeout,
        **heartbeat,
    )
    trainer = Trainer(share, module, lambda: manager.is_participating() and manager.num_participants() == share.members)
    model = torchft.DistributedDataParallel(manager, module)
    optimizer = torchft.Optimizer(manager, inner)
    while True:  # until it is killed
        step = manager.current_step()
        optimizer.zero_grad()
        trainer.accumulate(model, step, model.no_sync)
        clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        if manager.current_step() > step:
            trainer.stepped(step, share=manager.num_participants() / share.members)


if __name__ == "__main__":
    main()
