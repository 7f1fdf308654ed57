"""Two of three members die in one backward; the third computes what both had, in one piece.

m1 dies in its first micro-batch of step `KILL_AT`, m0 at the very end of the backward of its second: later blocks of
what it had summed are on their way by then. The survivor's own sum of those runs covers what the dead had delivered.
"""

import os
import signal
import time

import torch
from torch import Tensor, nn

import elastrain

KILL_AT, UNTIL, MICRO_BATCHES = 5, 10, 6
ME = os.environ.get("ELASTRAIN_MEMBER", "alone")


class Samples(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 500

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(16), torch.randn(1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    torch.set_num_threads(1)
    job = elastrain.init(seed=1, backups=2)
    loader = elastrain.DataLoader(Samples(), global_batch_size=2 * MICRO_BATCHES, micro_batch_size=2)
    layers = [nn.Linear(16, 128), nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 1)]
    model = nn.Sequential(*(module for layer in layers[:-1] for module in (layer, nn.Tanh())), layers[-1])
    now = {"step": -1, "micro_batch": 0}

    def dies_late(gradient: Tensor) -> None:
        if ME == "m0" and now["step"] == KILL_AT and now["micro_batch"] == 2:
            time.sleep(1.0)
            die()

    model[0].weight.register_hook(dies_late)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=UNTIL):
        now.update(step=step.number, micro_batch=0)
        for inputs, labels in step:
            now["micro_batch"] += 1
            if step.number == KILL_AT and now["micro_batch"] == 1 and ME == "m1":
                time.sleep(1.0)
                die()
            if step.number == KILL_AT and now["micro_batch"] == 1 and ME == "m2":
                time.sleep(3.0)
            step.backward(nn.functional.mse_loss(model(inputs), labels))


if __name__ == "__main__":
    main()
