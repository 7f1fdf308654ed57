"""Training on the test device, in which a member's stream, or its loop, never ends from some step on."""

import argparse
import os
import threading
import time

import torch
from torch import Tensor, nn

import elastrain

ME = os.environ.get("ELASTRAIN_MEMBER", "m0")
FOR_EVER_S = 3600.0


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(8)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a micro-batch waits, at the least")
    parser.add_argument("--device", default="late")
    parser.add_argument("--hangs", default="", help="MEMBER:STEP: the stream of its loop, from a forward on")
    parser.add_argument("--hangs-at", default="", help="MEMBER:STEP:N: the stream of the Nth operation, of any thread")
    parser.add_argument("--loops", default="", help="MEMBER:STEP: its loop, in a forward")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.device == "late":
        from tests.support import late

        late.install()
    job = elastrain.init(seed=3, backups="all")
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader = elastrain.DataLoader(Samples(), global_batch_size=24, micro_batch_size=4, shuffle=False)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=args.steps):
        at, _, count = args.hangs_at.rpartition(":")
        if at == f"{ME}:{step.number}":
            late.hang_at(int(count))
        for inputs in step:
            time.sleep(args.step_s)
            if args.loops == f"{ME}:{step.number}":
                time.sleep(FOR_EVER_S)
            there = inputs.to(args.device)
            if args.hangs == f"{ME}:{step.number}":
                torch.late.current_stream().hang = threading.Event()  # type: ignore[attr-defined]
            step.backward(model(there).square().mean())


if __name__ == "__main__":
    main()
