"""The training script: `train.py TRAINING …` with `models.Training`s as JSON, which run one after the other.

Lines go to `steps/<member>.txt` in the run's folder: step, digest, loss, gradient norm, skipped, learning rate, and at
the end how many steps there were, and the digest. What the device counted goes to `facts/<member>.jsonl`.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a script: make `experiments` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch.nn.parallel import DistributedDataParallel

import elastrain
from elastrain.device import device_of
from elastrain.offload.activations.deferred import DeferredLock
from experiments.accelerator import models, plants
from experiments.accelerator.meter import Meter, NoMeter
from experiments.accelerator.models import SEED, WARM, Training
from experiments.accelerator.peaks import HighestPeak
from experiments.accelerator.shared import share_device_memory

MEMBER = os.environ.get("ELASTRAIN_MEMBER", "")
"""Empty alone."""
READY_S = 20.0
"""The longest wait after a step for workers that are still starting: less than code between two steps may take."""
SETTLED = 3
"""Steps of the whole job after which the state of a lost member has all its copies again."""


def main() -> None:
    steps, folder = 0, Path(os.environ.get("ELASTRAIN_RUN_DIR", "."))
    _register(folder)
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        training = Training(**json.loads(text))
        prepare_device(training)
        steps = run(training if training.steps or training.seconds else replace(training, steps=steps), folder)
        gc.collect()  # DistributedDataParallel is a cycle
        if training.device == "cuda":
            torch.cuda.empty_cache()


def prepare_device(training: Training) -> None:
    """Make torch know the test device."""
    if training.device == "late":
        from tests.support import late

        late.install()
        late.handing_over(DeferredLock, gives=["__exit__", "wait"], takes=["__enter__", "wait"])
        late.configure(slowness=training.slowness)
        if training.compiled not in ("", *models.GRAPHS):
            late.keep_from_compiler()
        if training.setup.config is None:  # otherwise all members share one device
            place = os.environ.get("GROUP_RANK", "0"), os.environ.get("LOCAL_RANK", "0")
            late.configure(uuid=f"late-{'-'.join(place)}")
        torch.__future__.set_swap_module_params_on_conversion(True)
    share_device_memory(training)


def run(training: Training, folder: Path) -> int:
    """Run one training. Returns its number of steps."""
    plants.plant(training.plant, folder)
    file, meter = f"{MEMBER or 'alone'}.jsonl", NoMeter()
    highest = HighestPeak(training.device) if training.peaks else None
    if not training.steps:
        training = replace(training, steps=WARM + Plain(training).fitting())
        gc.collect()
    if training.timed:
        from tests.gpu.timing import Timing

        meter = Timing(folder / "times" / file, training)
    elif training.device == "late":
        meter = Meter(folder / "facts" / file, training)
    if training.plain:
        _plain(training, meter)
    else:
        _train(training, folder, meter)
    if highest is not None:
        highest.write(folder / "facts" / file)
    return training.steps


def _train(training: Training, folder: Path, meter: Any) -> None:
    """Train as README shows."""
    setup = training.setup
    job = elastrain.init(
        seed=SEED,
        backups=training.backups,
        loss_scale=setup.loss_scale,
        run_length=training.run_length or setup.run_length,
        deterministic=training.deterministic,
    )
    model = models.build(training)
    teacher = models.teacher_of(model, training)
    if teacher is not None:
        job.register("teacher", teacher)
    optimizer = models.optimizer_of(models.trained(model), training)
    order = training.order
    loader = elastrain.DataLoader(
        models.Samples(setup),
        global_batch_size=order.global_batch_size,
        micro_batch_size=order.micro_batch_size,
        pin_memory=training.timed and training.device == "cuda",
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    models.compile_blocks(model, training)
    troubles = _Troubles(training, folder)
    lines = (folder / "steps" / f"{MEMBER or 'alone'}.txt").open("a", buffering=1)
    saved = _saved(training, folder)
    watched = not training.meters and int(os.environ.get("ACCELERATOR_STAGES", "1")) == 1
    for step in job.steps(loader, until=training.steps):
        meter.begin_step(step.number)
        for given, targets in step:
            meter.begin()
            troubles.strike(step.number, job.world_size)
            time.sleep(training.pause_s)
            weight = 1.0 if not setup.weighted else float(targets.ne(0).sum())
            given, targets = models.moved((given, targets), training)
            with models.autocast(training), saved:
                loss = model(given, targets)
                loss = loss if teacher is None else teacher.pulled(loss, given, targets)
            meter.backward_begins()
            with models.capturing(training):
                step.backward(loss, weight=weight)
            meter.end()
        if not training.timed:
            digest = job.digest() if watched else "-"  # a member of a pipeline has its own blocks' parameters only
            rate = optimizer.param_groups[0]["lr"]
            lines.write(f"{step.number} {digest} {step.loss!r} {step.grad_norm!r} {step.skipped} {rate!r}\n")
        scheduler.step()
        if teacher is not None and setup.teacher == "mean":
            teacher.follow(model)
        meter.end_step()
        if step.number >= training.wait_from:
            _wait_for_newcomers(folder, job.world_size, training)
    if not training.timed:
        lines.write(f"{training.steps} {job.digest()}\n")
    if isinstance(saved, elastrain.offload.ActivationOffload) and not saved.stats().spilled_bytes:
        raise RuntimeError("no activation has left")
    meter.close()


def _saved(training: Training, folder: Path) -> AbstractContextManager[object]:
    """Return the context of forwards: activations leave, but for what is in use and on its way."""
    if not training.saved:
        return nullcontext()
    (folder / "drive").mkdir(exist_ok=True)
    return elastrain.offload.save_on_disk(folder / "drive", min_bytes=256)


def _plain(training: Training, meter: Any) -> None:
    trainer = Plain(training)
    for step in range(training.steps):
        meter.begin_step(step)
        trainer.step()
        meter.end_step()
    meter.close()


class Plain:
    """The loop of plain PyTorch, with the same sums of gradients, and with float32 masters of parameters below that."""

    def __init__(self, training: Training) -> None:
        torch.manual_seed(SEED)
        torch.use_deterministic_algorithms(training.timed and training.deterministic)
        self.training = training
        module: torch.nn.Module = models.build(training)
        if training.ddp and training.device == "late":  # Gloo knows no test device
            module, self.training = module.cpu(), replace(training, device="cpu")
        self.parameters = models.trained(module)
        self.model = module
        if training.ddp:
            _join_group("nccl" if training.device == "cuda" else "gloo")
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        self.masters: list[torch.Tensor] = list(self.parameters)
        self.has_masters = training.setup.dtype != torch.float32
        if self.has_masters:
            self.masters = [parameter.detach().float() for parameter in self.parameters]
        for parameter in self.parameters if self.has_masters and not training.ddp else ():
            parameter.grad_dtype = torch.float32
        self.optimizer = models.optimizer_of(self.masters, training)
        data, order = models.Samples(training.setup), training.order
        drawn = [[data[at] for _, at in order.samples(0, index)] for index in range(training.micro_batches)]
        self.batches = [torch.utils.data.default_collate(each) for each in drawn]
        if training.device == "cuda":
            self.batches = [[each.pin_memory() for each in batch] for batch in self.batches]

    def step(self) -> None:
        """Compute one step, without waiting for the device."""
        for number, batch in enumerate(self.batches, 1):
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = number == len(self.batches)
            given, targets = models.moved(batch, self.training)
            (self.model(given, targets) / len(self.batches)).backward()
        if self.has_masters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                master.grad = None if parameter.grad is None else parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        if self.has_masters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        self.optimizer.zero_grad()
        self.model.zero_grad()

    def fitting(self) -> int:
        """Return the number of steps that take as long as the timed ones are to take."""
        for _ in range(WARM):
            self.step()
        port = device_of(torch.device(self.training.device))
        port.synchronize()
        began_s = time.perf_counter()
        self.step()
        port.synchronize()
        return min(100, max(4, round(self.training.seconds / (time.perf_counter() - began_s))))


@cache
def _join_group(backend: str) -> None:
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


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
        if what == "killed" or self._training.device == "cpu":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._training.device != "late":
            strike_gpu(what, self._training.device)
            return
        from tests.support import late

        match what:
            case "device error":
                late.fail_at(30)
            case "out of memory":
                late.configure(capacity_bytes=torch.get_device_module("late").memory_allocated() + 1024)
            case "stream hangs":
                late.hang_at(30)


def strike_gpu(what: str, device: str) -> None:
    """Bring about an error that sticks to the process, ask for too much memory, or submit work that does not end."""
    if what == "stream hangs":
        for _ in range(64):
            torch.cuda._sleep(1 << 40)
    elif what == "out of memory":
        torch.empty(1 << 46, dtype=torch.uint8, device=device)
    else:  # read far behind the memory that the device has given
        small = torch.zeros(1 << 20, device=device)
        interface = {"data": (small.data_ptr(), False), "shape": (1 << 40,), "typestr": "<f4", "version": 2}
        wide = torch.as_tensor(type("Wide", (), {"__cuda_array_interface__": interface})(), device=device)
        wide[1 << 39 :: 1 << 36].sum().item()


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
    for part in ("steps", "facts", "times", "stacks"):
        (folder / part).mkdir(exist_ok=True)
    stacks = (folder / "stacks" / f"{MEMBER or 'alone'}.txt").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)


if __name__ == "__main__":
    main()
