"""The training script of a storm: what the case says, and a line per committed step with all that must be equal.

    python experiments/storm/train.py CASE.json

Lines go to `steps/<member>.txt` in the run's folder: step, digest, loss, gradient norm, skipped, learning rate; the
last one has how many steps there were, and the digest at the end. While a file `hold` lies in the run's folder, steps
take longer, so that the faults that are still due find some. SIGUSR1 writes the stacks of all threads to `stacks/`.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from pathlib import Path

import torch

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.storm import models
from experiments.storm.cases import Case

HOLD_S = 1.0


def main() -> None:
    case = Case.from_json(Path(sys.argv[1]).read_text())
    folder = Path(os.environ["ELASTRAIN_RUN_DIR"])
    lines = _register(folder)
    torch.set_num_threads(1)
    training = case.training
    job = elastrain.init(seed=case.seed, run_length=training.run_length, backups=training.backups)
    device = _device(case)
    net = models.build(case).to(device)
    optimizer = models.build_optimizer(net, training)
    scheduler = models.build_scheduler(optimizer, training)
    loader = elastrain.DataLoader(
        models.Samples(case.model),
        global_batch_size=training.micro_batches * training.micro_batch_size,
        micro_batch_size=training.micro_batch_size,
        num_workers=training.loaders,
    )
    net, optimizer, loader = job.prepare(net, optimizer, loader, max_grad_norm=training.max_grad_norm)
    for step in job.steps(loader, until=training.steps):
        factor = 0.5 + models.drawn(training)
        for inputs, labels in step:
            models.sleep_ms(training.pause_ms, uneven=training.uneven)
            outputs = net(models.as_input(inputs, case.model).to(device))
            loss, weight = models.loss_of(outputs, labels.to(device), training)
            loss = loss * factor
            if step.number == training.nan_at:
                loss = loss * float("nan")
            if training.weight == "none":
                step.backward(loss)
            else:
                step.backward(loss, weight=weight)
        rate = optimizer.param_groups[0]["lr"]
        # A member of a pipeline has the parameters of its own blocks only: there the last digest counts for all.
        digest = job.digest() if case.started.stages == 1 else "-"
        lines.write(f"{step.number} {digest} {step.loss!r} {step.grad_norm!r} {step.skipped} {rate!r}\n")
        if scheduler is not None:
            scheduler.step()
        if models.MEMBER and (folder / "hold").exists():
            time.sleep(HOLD_S)
    lines.write(f"{training.steps} {job.digest()}\n")


def _device(case: Case) -> str:
    """The device of a member. Alone, the script computes on the CPU."""
    device = case.started.device if models.MEMBER else "cpu"
    if device == "late":
        from tests.support import late

        late.install()
        torch.__future__.set_swap_module_params_on_conversion(True)  # ties stay
    return device


def _register(folder: Path):  # type: ignore[no-untyped-def]  # a text file, unbuffered by lines
    """Where this process writes its lines, and, asked by SIGUSR1, its stacks."""
    name = models.MEMBER or "alone"
    for part in ("steps", "stacks"):
        (folder / part).mkdir(exist_ok=True)
    stacks = (folder / "stacks" / f"{name}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # A member of a later life may have the name of an earlier one.
    return (folder / "steps" / f"{name}.txt").open("a", buffering=1)


if __name__ == "__main__":
    main()
