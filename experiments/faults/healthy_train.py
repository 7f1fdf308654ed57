"""A script that is slow in every honest way: compiling, waiting for data, evaluating, saving, a slow first step.

    python experiments/faults/healthy_train.py PLAN.json

The plan says at which steps what lasts how long. What is neither loading nor `torch.compile` is declared with
`job.phase`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.faults.healthy import GLOBAL_BATCH_SIZE, MICRO_BATCH_SIZE, SAMPLES, Plan


class Stalling(Dataset[tuple[Tensor, Tensor]]):
    """Some samples take long to come, as from storage that is busy."""

    def __init__(self, stalls_s: Mapping[int, float]) -> None:
        self._stalls_s = stalls_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self._stalls_s.get(index, 0.0))
        features = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return features, features.sin().sum().reshape(1)


def main() -> None:
    plan = Plan.from_json(json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    job = elastrain.init(seed=0)
    loader = elastrain.DataLoader(
        Stalling(plan.stalls_s), global_batch_size=GLOBAL_BATCH_SIZE, micro_batch_size=MICRO_BATCH_SIZE
    )
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = job.prepare(model, optimizer, loader)
    for step in job.steps(loader, until=plan.steps):
        for features, wanted in step:
            time.sleep(plan.micro_batch_s * (10 if step.number == 0 else 1))
            if step.number in plan.compile_s:
                with job.phase("compile", timeout=plan.compile_s[step.number] + 60):
                    time.sleep(plan.compile_s.pop(step.number))
            step.backward(nn.functional.mse_loss(model(features), wanted))
        if step.number in plan.evaluate_s:
            with job.phase("evaluation", timeout=plan.evaluate_s[step.number] + 60):
                time.sleep(plan.evaluate_s[step.number])
        if step.number in plan.save_s and job.rank == 0:
            with job.phase("checkpoint", timeout=plan.save_s[step.number] + 60):
                time.sleep(plan.save_s[step.number])


if __name__ == "__main__":
    main()
