"""A step commits while one member is still in the backward of a run that it computes again.

The victim dies in step `KILL_AT` after it has handed over its share; the others dawdle before they hand over theirs.
What only the dead had as a primary is computed again, and the step is complete as soon as those blocks are there: the
earlier blocks of that backward come when nobody needs them any more. Slow is a hook in the first block or, with
`--stem`, the backward of the block itself: few parameters and much work.
"""

import argparse
import os
import signal
import threading
import time

import torch
from torch import Tensor, nn

import elastrain

KILL_AT, UNTIL, MICRO_BATCHES, SHARE = 3, 6, 6, 2
ME = os.environ.get("ELASTRAIN_MEMBER", "alone")


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, inputs: int) -> None:
        self.inputs = inputs

    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(self.inputs), torch.randn(1)


class Stem(nn.Module):
    """A convolution of 800 parameters over a large picture: its backward takes longer than all the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 16, 7, padding=3)

    def forward(self, inputs: Tensor) -> Tensor:
        picture = inputs.view(-1, 1, 4, 4).tile(1, 1, 16, 16)
        return self.convolution(picture).tanh().mean((2, 3)).repeat(1, 4)


class Model(nn.Module):
    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.middle, self.last = first, nn.Linear(64, 128), nn.Linear(128, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.middle(self.first(inputs).tanh()).tanh())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--victim", required=True)
    parser.add_argument("--stem", action="store_true", help="a convolution instead of a hook that sleeps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    micro = 64 if args.stem else 2
    job = elastrain.init(seed=1, backups=1)
    loader = elastrain.DataLoader(Samples(16), global_batch_size=MICRO_BATCHES * micro, micro_batch_size=micro)
    model = Model(Stem() if args.stem else nn.Linear(16, 64))
    now = {"step": -1, "micro_batch": 0}

    def is_left_behind() -> bool:
        return ME not in ("alone", args.victim) and now["step"] == KILL_AT

    if not args.stem:
        model.first.weight.register_hook(
            lambda gradient: time.sleep(0.5) if is_left_behind() and now["micro_batch"] > SHARE else None
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=UNTIL):
        now.update(step=step.number, micro_batch=0)
        for inputs, labels in step:
            now["micro_batch"] += 1
            if is_left_behind() and now["micro_batch"] == SHARE:
                time.sleep(1.5)
            step.backward(nn.functional.mse_loss(model(inputs), labels))
            if args.victim == ME and step.number == KILL_AT and now["micro_batch"] == SHARE:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()


if __name__ == "__main__":
    main()
