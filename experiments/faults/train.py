"""The script of all cells: one small model with all that makes bits depend on who computes, and a line per step.

    python experiments/faults/train.py STEPS [audit] [half] [drives]

`half` keeps parameters in bfloat16, `drives` all shards on the drive that the job has.

Lines go to `steps/<member>.txt` in the run's folder: step, digest, loss, gradient norm, skipped, learning rate; after
the loop, how many steps there were, and the digest that the job ends with. While a file `brake` lies there,
micro-batches take longer, so that faults find steps to strike in; waiting changes no bit. A number in a file `enough`
is how many steps are enough: every member leaves the loop after the last of them.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import os

import elastrain
from elastrain.memory import held_shards
from experiments.storm import models
from experiments.storm.cases import Case, Model, Training

BRAKE_S, BRAKE_HARD_S = 0.05, 0.5
"""Per micro-batch; hard in the last third of the steps, so that these last until all cells have had their turn."""
MICRO_BATCHES, MICRO_BATCH_SIZE, SAMPLES, SEED = 6, 4, 300, 5
BACKUPS = 2
"""A second loss while the first one is mended is one of the faults."""

MODEL = Model(
    shape="token",
    depth=3,
    width=64,
    image=16,
    norm="batch",
    dropout=0.1,
    tied=True,
    frozen="middle",
    unused=False,
    empty=False,
    sometimes=False,
    checkpointing=False,
    dtype="float32",
    samples=SAMPLES,
)
"""BatchNorm, dropout, a tied embedding, a frozen layer."""


def training(steps: int) -> Training:
    """Weights are the counts of words; the loop draws a number per step; the schedule does not know the last step."""
    return Training(
        steps=steps,
        micro_batches=MICRO_BATCHES,
        micro_batch_size=MICRO_BATCH_SIZE,
        run_length=1,
        backups=BACKUPS,
        optimizer="adamw",
        groups=2,
        scheduler="warmup",
        max_grad_norm=0.5,
        weight="tensor",
        draws="numpy",
        nan_at=-1,
        loaders=1,
        pause_ms=0.0,
        slow="none",
        slow_ms=0.0,
        uneven=False,
    )


def main() -> None:
    steps = int(sys.argv[1])
    folder = Path(os.environ["ELASTRAIN_RUN_DIR"])
    model = replace(MODEL, dtype="bfloat16" if "half" in sys.argv[2:] else MODEL.dtype)
    case = Case(seed=SEED, workers=4, nodes=1, model=model, training=training(steps), faults=())
    (folder / "steps").mkdir(exist_ok=True)
    torch.set_num_threads(1)
    job = elastrain.init(seed=case.seed, run_length=case.training.run_length, backups=case.training.backups)
    if "audit" in sys.argv[2:]:  # of every micro-batch
        job.audit("all")
    if "drives" in sys.argv[2:]:
        keep_shards_on_drives()
    net = models.build(case)
    optimizer = models.build_optimizer(net, case.training)
    scheduler = models.build_scheduler(optimizer, case.training)
    assert scheduler is not None
    loader = elastrain.DataLoader(
        models.Samples(case.model),
        global_batch_size=MICRO_BATCHES * MICRO_BATCH_SIZE,
        micro_batch_size=MICRO_BATCH_SIZE,
    )
    net, optimizer, loader = job.prepare(net, optimizer, loader, max_grad_norm=case.training.max_grad_norm)
    with (folder / "steps" / f"{models.MEMBER or 'alone'}.txt").open("w", buffering=1) as lines:
        for step in job.steps(loader, until=steps):
            factor = 0.5 + models.drawn(case.training)
            for inputs, labels in step:
                brake(folder, step.number, steps)
                loss, weight = models.loss_of(net(inputs), labels, case.training)
                step.backward(loss * factor, weight=weight)
            if step.number >= (enough := enough_steps(folder, steps)):
                break  # a newcomer whose step nobody computes any more
            rate = optimizer.param_groups[0]["lr"]
            lines.write(f"{step.number} {job.digest()} {step.loss!r} {step.grad_norm!r} {step.skipped} {rate!r}\n")
            scheduler.step()
            if step.number + 1 == enough < steps:
                break
        lines.write(f"{enough_steps(folder, steps)} {job.digest()}\n")


def keep_shards_on_drives() -> None:
    """However small they are, and however much memory there is."""
    chosen = held_shards.choose_shards
    held_shards.choose_shards = lambda held, wanted_bytes: chosen(held, 1 << 60)


def enough_steps(folder: Path, steps: int) -> int:
    """The file names a step well ahead, so that all members read it before they come there."""
    try:
        return int((folder / "enough").read_text())
    except (FileNotFoundError, ValueError):
        return steps


def brake(folder: Path, step: int, steps: int) -> None:
    if models.MEMBER and (folder / "brake").exists():
        time.sleep(BRAKE_S if step < 2 * steps / 3 else BRAKE_HARD_S)


if __name__ == "__main__":
    main()
