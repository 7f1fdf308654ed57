"""`resumed_training.py`, in which m1 sets another weight decay by itself, once a checkpoint is complete."""

import os
from pathlib import Path
from typing import Any

import torch

from tests.integration.scripts import resumed_training

Scheduler = torch.optim.lr_scheduler.CosineAnnealingLR
_step = Scheduler.step


def step(self: Any, *args: Any) -> None:
    _step(self, *args)
    if os.environ.get("ELASTRAIN_MEMBER") == "m1" and self.last_epoch > 0:
        there = any(Path(os.environ["ELASTRAIN_CHECKPOINT_DIR"]).glob("*/manifest.json"))
        self.optimizer.param_groups[0]["weight_decay"] = 0.5 if there else 0.01


if __name__ == "__main__":
    Scheduler.step = step  # type: ignore[method-assign]  # that is what this script is for
    resumed_training.main()
