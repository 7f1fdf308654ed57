"""A script for the test device that gives a member another device, or moves the model or a batch wrongly."""

from __future__ import annotations

import argparse
import os
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--device", default="late")
parser.add_argument("--of-m1", default="", help="Settings of m1's device, as JSON; or the name of another device.")
parser.add_argument("--moved", choices=["", "before the loop", "in the loop"], default="")
parser.add_argument("--left-on-the-host", choices=["", "inputs", "targets"], default="")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()
if os.environ.get("ELASTRAIN_MEMBER") == "m1" and args.of_m1:
    if args.of_m1.startswith("{"):
        os.environ["LATE"] = args.of_m1
    else:
        args.device = args.of_m1

import torch  # noqa: E402  the settings of the test device are read on import
from torch import nn  # noqa: E402

import elastrain  # noqa: E402
from tests.support import late  # noqa: E402


class Samples:
    """Samples that their number decides."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": torch.full((4,), index / 32), "targets": torch.tensor([index / 8])}


def main() -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)  # as CUDA: parameters stay the same objects
    torch.set_num_threads(1)
    late.install()
    job = elastrain.init(seed=1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = elastrain.DataLoader(Samples(), global_batch_size=8, micro_batch_size=4)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    if args.moved == "before the loop":
        model.to("cpu")
    for step in job.steps(loader, until=args.steps):
        if args.moved == "in the loop" and step.number == 1:
            model.to("cpu")
        for batch in step:
            there = {
                name: tensor if name == args.left_on_the_host else tensor.to(args.device)
                for name, tensor in batch.items()
            }
            step.backward((model(there["inputs"]) - there["targets"]).square().mean())


if __name__ == "__main__":
    main()
