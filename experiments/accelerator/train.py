"""The training script: `train.py TRAINING` with a `models.Training` as JSON.

Lines go to `steps/<member>.txt` in the run's folder: step, digest, loss, gradient norm, skipped, learning rate, and at
the end how many steps there were, and the digest. What the device counted goes to `facts/<member>.jsonl`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import elastrain
from experiments.accelerator import models, plants
from experiments.accelerator.meter import Meter, NoMeter
from experiments.accelerator.models import SEED, Training

MEMBER = os.environ.get("ELASTRAIN_MEMBER", "")
"""Empty alone."""
READY_S = 20.0
"""The longest wait after a step for workers that are still starting: less than code between two steps may take."""
SETTLED = 3
"""Steps of the whole job after which the state of a lost member has all its copies again."""


def main() -> None:
    training = Training(**json.loads(sys.argv[1]))
    folder = Path(os.environ.get("ELASTRAIN_RUN_DIR", "."))
    _register(folder)
    torch.set_num_threads(1)
    if training.device == "late":
        from tests.support import late

        late.install()
        place = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0")
        late.configure(uuid=f"late-{'-'.join(place)}", slowness=training.slowness)
        torch.__future__.set_swap_module_params_on_conversion(True)
    plants.plant(training.plant, folder)
    meter = Meter(folder / "facts" / f"{MEMBER or 'alone'}.jsonl", training) if training.device == "late" else NoMeter()
    if training.plain:
        _plain(training, meter)
    else:
        _train(training, folder, meter)


def _train(training: Training, folder: Path, meter: Any) -> None:
    """Train as README shows."""
    setup = training.setup
    job = elastrain.init(seed=SEED, backups=training.backups, loss_scale=setup.loss_scale, run_length=setup.run_length)
    model = models.build(training)
    teacher = models.teacher_of(model, training)
    if teacher is not None:
        job.register("teacher", teacher)
    optimizer = models.optimizer_of(model, training)
    order = training.order
    loader = elastrain.DataLoader(
        models.Samples(setup.shape),
        global_batch_size=order.global_batch_size,
        micro_batch_size=order.micro_batch_size,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    troubles, lines = (
        _Troubles(training, folder),
        (folder / "steps" / f"{MEMBER or 'alone'}.txt").open("a", buffering=1),
    )
    watched = not training.meters and int(os.environ.get("ACCELERATOR_STAGES", "1")) == 1
    for step in job.steps(loader, until=training.steps):
        meter.begin_step(step.number)
        for given, targets in step:
            meter.begin()
            troubles.strike(step.number, job.world_size)
            time.sleep(training.pause_s)
            weight = 1.0 if not setup.weighted else float(targets.ne(0).sum())
            given, targets = models.moved((given, targets), training)
            with models.autocast(training):
                loss = model(given, targets)
                loss = loss if teacher is None else teacher.pulled(loss, given, targets)
            meter.backward_begins()
            step.backward(loss, weight=weight)
            meter.end()
        digest = job.digest() if watched else "-"  # a member of a pipeline has the parameters of its own blocks only
        rate = optimizer.param_groups[0]["lr"]
        lines.write(f"{step.number} {digest} {step.loss!r} {step.grad_norm!r} {step.skipped} {rate!r}\n")
        scheduler.step()
        if teacher is not None and setup.teacher == "mean":
            teacher.follow(model)
        meter.end_step()
        _wait_for_newcomers(folder, job.world_size, training)
    lines.write(f"{training.steps} {job.digest()}\n")
    meter.close()


def _plain(training: Training, meter: Any) -> None:
    """Train as plain PyTorch does, with the same sums of gradients."""
    torch.manual_seed(SEED)
    model = models.build(training)
    optimizer = models.optimizer_of(model, training)
    data = models.Samples(training.setup.shape)
    for step in range(training.steps):
        meter.begin_step(step)
        for index in range(training.micro_batches):
            samples = [data[position % len(data)] for _, position in training.order.samples(step, index)]
            given, targets = models.moved(torch.utils.data.default_collate(samples), training)
            (model(given, targets) / training.micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.end_step()
    meter.close()


class _Troubles:
    """The faults of this member, by its name."""

    def __init__(self, training: Training, folder: Path) -> None:
        self._mine = {step: what for member, step, what in training.troubles if member == MEMBER}
        self._training, self._folder = training, folder
        self._whole = 0
        """Steps of the whole job since a member was lost."""
        self._lost = False
        self._step = -1

    def strike(self, step: int, world_size: int) -> None:
        """Let what is due happen in the first micro-batch of a step."""
        if step == self._step:
            return
        self._step, is_whole = step, world_size == self._training.members
        self._lost |= not is_whole
        self._whole += self._lost and is_whole
        if (what := self._mine.get(step)) is not None:
            self._strike(what)
        elif self._mine.get(-1) == "killed after the other" and self._whole == SETTLED:
            os.kill(os.getpid(), signal.SIGKILL)

    def _strike(self, what: str) -> None:
        (self._folder / "struck").write_text(repr(time.monotonic()))
        if what == "loop hangs":
            time.sleep(1000)
        if what == "killed" or self._training.device != "late":
            os.kill(os.getpid(), signal.SIGKILL)
        from tests.support import late

        match what:
            case "device error":
                late.fail_at(30)
            case "out of memory":
                late.configure(capacity_bytes=torch.get_device_module("late").memory_allocated() + 1024)
            case "stream hangs":
                late.hang_at(30)


def _wait_for_newcomers(folder: Path, world_size: int, training: Training) -> None:
    """Wait until every worker that the agents have started is ready to join, so that it joins before the job's end."""
    deadline_s = time.monotonic() + READY_S
    while MEMBER and world_size < training.members and time.monotonic() < deadline_s:
        events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
        if events.count("ready") >= training.members + events.count("death"):
            return
        time.sleep(0.05)


def _register(folder: Path) -> None:
    """Make the folders of this process's lines. SIGUSR1 writes its stacks."""
    for part in ("steps", "facts", "stacks"):
        (folder / part).mkdir(exist_ok=True)
    stacks = (folder / "stacks" / f"{MEMBER or 'alone'}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


if __name__ == "__main__":
    main()
