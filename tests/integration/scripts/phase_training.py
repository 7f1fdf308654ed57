"""Training in which some members stand still for a while, or for ever, in what a script does besides its steps."""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

import elastrain
import elastrain.comm

ME = os.environ.get("ELASTRAIN_MEMBER", "m0")
FOR_EVER_S = 3600.0


class Samples(torch.utils.data.Dataset[Tensor]):
    """`stuck`: the member whose loader never comes back with the sample of that number."""

    def __init__(self, stuck: str) -> None:
        self.stuck, _, number = stuck.partition(":")
        self.number = int(number or -1)

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> Tensor:
        if (ME, index) == (self.stuck, self.number):
            time.sleep(FOR_EVER_S)
        return torch.randn(8)


def group_of_two() -> dist.ProcessGroup | None:
    """Of m0 and m1; None for m2, and for those who come later."""
    if ME not in ("m0", "m1", "m2"):
        return None
    dist.init_process_group("elastrain")
    group = dist.new_group([0, 1])
    return group if ME != "m2" else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.0, help="how long a micro-batch waits, at the least")
    parser.add_argument("--evaluates", default="", help="MEMBER:STEP: 4 s inside of a phase, and 4 s outside")
    parser.add_argument("--saves", default="", help="MEMBER:STEP: never comes back from a checkpoint in a phase of 2 s")
    parser.add_argument("--stuck", default="", help="MEMBER:SAMPLE: its loader never comes back")
    parser.add_argument("--kills", default="", help="MEMBER:SAMPLE: its loader dies of it")
    parser.add_argument(
        "--skips", default="", help="MEMBER:STEP: never comes to the collective of a group of m0 and m1"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = elastrain.init(seed=3, backups="all")
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = elastrain.DataLoader(Samples(args.stuck), global_batch_size=24, micro_batch_size=4, shuffle=False)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    group = group_of_two() if args.skips else None
    for step in job.steps(loader, until=args.steps):
        with job.phase("data", timeout=2.0):
            for inputs in step:
                time.sleep(args.step_s)
                step.backward(model(inputs).square().mean())
        if args.evaluates == f"{ME}:{step.number}":
            with job.phase("evaluation", timeout=60.0):
                time.sleep(4.0)
            time.sleep(4.0)
        if group is not None:
            with job.phase("counting", timeout=2.0):
                if args.skips == f"{ME}:{step.number}":
                    time.sleep(FOR_EVER_S)
                dist.all_reduce(torch.ones(3), group=group)
        if args.saves == f"{ME}:{step.number}":
            with job.phase("checkpoint", timeout=2.0):
                time.sleep(FOR_EVER_S)


if __name__ == "__main__":
    main()
