"""The training script: `train.py KIND STEPS [end]`. Says number, loss and digest of every step.

With `end` the digest comes at the end alone: in the steps of a pipeline no member has the whole model.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import transformers

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.strangers.models import MODELS, Samples, loss_of

PAUSE_S = 0.005


def main() -> None:
    kind, steps, at_the_end = sys.argv[1], int(sys.argv[2]), "end" in sys.argv[3:]
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    job = elastrain.init(seed=3)
    model = MODELS[kind]().train()
    for part in model.modules():
        if hasattr(part, "config"):
            part.config.use_cache = False  # it would hand activations from layer to layer, for generating
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 5, steps)
    loader = elastrain.DataLoader(Samples(), global_batch_size=21, micro_batch_size=3, num_workers=1)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    for step in job.steps(loader, until=steps):
        for batch in step:
            step.backward(loss_of(kind, model, batch))
            time.sleep(PAUSE_S)
        scheduler.step()
        say(f"step {step.number} {step.loss} {'' if at_the_end else job.digest()}")
    say(f"step {steps} {job.digest()}")


def say(line: str) -> None:
    """One write: print makes several, and the lines of several members would lie within one another."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
