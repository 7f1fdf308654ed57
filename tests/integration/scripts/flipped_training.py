"""A small job in which one bit of one member's memory changes between two steps, as no version counter can tell.

`--flip MEMBER:STEP:WHAT`; WHAT is `own` (a parameter that the member is the primary of), `taken` (one that it took
from another), `state` (optimizer state that it keeps as a backup) or `gradient` (a gradient that it keeps as a backup).
"""

import argparse
import os
import sys
import time
from typing import Any

import torch
from torch import Tensor, nn

import elastrain


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(16), torch.randn(1)


def flip(values: Tensor) -> None:
    """One bit of the sixth number, where nothing but a digest looks; NumPy writes it, so that torch does not know.

    It is bit 15 of 32: in an update, rounding takes away one changed lowest bit in twenty, and nothing is left to find.
    """
    values.detach()[5:6].numpy().view("uint8")[1] ^= 0x80


def until_verified(core: Any, shard: int, step: int) -> None:
    """The engine verifies behind the loop's back."""
    deadline_s = time.monotonic() + 60
    while not core.machine.custody.holdings.has(shard, step):
        assert time.monotonic() < deadline_s, f"shard {shard} is not verified as of step {step}"
        time.sleep(0.001)


def strike(job: elastrain.Job, step: int, what: str) -> None:
    engine = job._prepared.engine  # type: ignore[union-attr]  # prepared
    core, executor = engine._core, engine._parts.executor
    me = os.environ.get("ELASTRAIN_MEMBER", "m0")
    trained = [shard for shard in executor.layout.shards if shard.lanes]
    mine = next(s for s in trained if core.holders[s.index].primary == me)
    theirs = next(s for s in trained if me in core.holders[s.index].backups)
    match what:
        case "own":
            flip(executor.model.parameters_of(mine))
        case "taken":
            flip(executor.model.parameters_of(theirs))
        case "state":
            until_verified(core, theirs.index, step)
            flip(executor.states[theirs.index].parameters)
        case _:
            raise ValueError(what)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--flip", default="")
    args = parser.parse_args()
    member, at, what = args.flip.split(":") if args.flip else ("", "-1", "")
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, backups=args.backups)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = elastrain.DataLoader(Samples(), global_batch_size=24, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=args.steps):
        for inputs, wanted in step:
            step.backward(nn.functional.mse_loss(model(inputs), wanted))
        if step.number == int(at) and member == os.environ.get("ELASTRAIN_MEMBER", "m0"):
            strike(job, step.number, what)
    sys.stderr.write(f"digest {job.digest()}\n")


if __name__ == "__main__":
    main()
