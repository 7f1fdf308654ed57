"""The loops in which the same program trains: plain PyTorch, a job, and both ways of offloading."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from experiments.programs.holding import Hold
from experiments.programs.program import Program

SHARES_WITHIN = (0.6, 0.3)
"""Limits of a training within memory, as parts of four times its parameters."""
SHARES_SAVED = (None, 0.5, 1e-9)
"""Limits of saved activations, as parts of what one forward saves."""
TRIES = 14
"""Trainings until a limit has to hold: each refusal names the smallest one that does."""


class PlainStep:
    """A step of a plain loop, with the names of a job's step. Gradients are added up, then divided by the weights."""

    def __init__(self, number: int, batches: list[Any]) -> None:
        self.number = number
        self.loss, self.grad_norm, self.skipped = 0.0, 0.0, False
        self._batches, self._weight = batches, 0.0

    def __iter__(self) -> Iterator[Any]:
        yield from self._batches

    def backward(self, loss: Tensor, *, weight: Any = 1.0) -> None:
        if not (weight := float(weight)):
            return
        (loss * weight).backward()
        self.loss += float(loss.detach()) * weight
        self._weight += weight

    def average(self, model: nn.Module) -> None:
        """Divide loss and gradients by the sum of the weights."""
        self.loss = self.loss / self._weight if self._weight else math.nan
        for p in model.parameters():
            if p.grad is not None and self._weight not in (0.0, 1.0):
                p.grad.div_(self._weight)
        self.skipped = not math.isfinite(self.loss)


def seed() -> None:
    """Seed all generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def batches_of(program: Program, number: int) -> list[Any]:
    """Return the micro-batches of a step as a job's loader gives them without shuffling."""
    collate = type(program).collate or default_collate
    start, size = number * program.whole, len(program.data)
    return [
        collate([program.data[(start + first + k) % size] for k in range(program.micro)])
        for first in range(0, program.whole, program.micro)
    ]


Update = Callable[[], float]
"""Clip, update and forget the gradients. Returns their norm."""


def train(program: Program, update: Update) -> None:
    """Train as plain PyTorch does."""
    for number in range(program.steps):
        step = PlainStep(number, batches_of(program, number))
        program.before(step)
        for batch in step:
            program.body(step, batch)
        step.average(program.model)
        program.gradients()
        if step.skipped:
            program.optimizer.zero_grad()
        else:
            step.grad_norm = update()
        program.losses.append(step.loss)
        if program.after(step):
            break


def plain(make: Callable[[], Program]) -> Iterator[tuple[str, Program]]:
    """Train in memory."""
    seed()
    program = make()
    program.build()
    program.prepared()

    def update() -> float:
        norm = _clipped(program)
        program.optimizer.step()
        program.optimizer.zero_grad()
        return norm

    train(program, update)
    program.end()
    yield "plain", program


def _clipped(program: Program) -> float:
    limit = program.max_grad_norm
    return float(nn.utils.clip_grad_norm_(program.model.parameters(), math.inf if limit is None else limit))


def in_a_job(make: Callable[[], Program], hold: Hold) -> Program:
    """Train as README shows. Numbers of a job's loop differ from a plain one's by rounding and by what is drawn."""
    import elastrain

    job = elastrain.init(seed=0)
    seed()
    program = make()
    program.job = job
    program.build()
    for name, thing in program.registered().items():
        job.register(name, thing)
    loader = elastrain.DataLoader(
        program.data,
        global_batch_size=program.whole,
        micro_batch_size=program.micro,
        shuffle=False,
        collate_fn=type(program).collate,
    )
    told = {"max_grad_norm": program.max_grad_norm, "elementwise": program.elementwise}
    program.model, program.optimizer, loader = job.prepare(program.model, program.optimizer, loader, **told)
    program.prepared()
    for step in job.steps(loader, until=program.steps):
        program.before(step)
        for batch in step:
            program.body(step, batch)
        program.gradients()
        program.losses.append(step.loss)
        stop = program.after(step)
        hold.between(step.number, job)
        if stop:
            break
    program.end()
    return program


def within(make: Callable[[], Program]) -> Iterator[tuple[str, Program]]:
    """Train within limits that hold a part of what training takes."""
    from elastrain.offload import LimitTooSmallError
    from elastrain.offload.lifetimes import within as module
    from tests.integration.offload.lifetimes.touching import small_memory

    module.memory_for = small_memory  # type: ignore[assignment]
    for share in SHARES_WITHIN:
        least = 0
        for _ in range(TRIES):
            try:
                yield f"within {share:g}", _trained_within(make, share, least)
                break
            except LimitTooSmallError as error:
                least = max(error.smallest_bytes, error.limit_bytes + 1)
        else:
            raise RuntimeError(f"no limit holds at {share:g} of the memory that training takes")


def _trained_within(make: Callable[[], Program], share: float, least: int) -> Program:
    from elastrain.offload.lifetimes.within import within as open_within

    seed()
    program = make()
    program.build()
    size_bytes = sum(p.nbytes for p in program.model.parameters())
    limit = max(least, int(share * 4 * size_bytes) + (256 << 10))
    with tempfile.TemporaryDirectory(prefix="elastrain-programs-") as folder:
        training = open_within(program.model, program.optimizer, dirs=[_told(program, folder)], memory_limit=limit)
        try:
            program.prepared()
            norm = math.inf if program.max_grad_norm is None else program.max_grad_norm
            train(program, lambda: float(training.step(max_grad_norm=norm)))
            training.close()
        finally:
            if training.is_open():
                training.abandon()
        program.end()
    return program


def save(make: Callable[[], Program]) -> Iterator[tuple[str, Program]]:
    """Train with saved activations on a disk, all of them and within limits."""
    from elastrain.offload import LimitTooSmallError

    saved_bytes = 0
    for share in SHARES_SAVED:
        limit = None if share is None else max(1, int(saved_bytes * share))
        for _ in range(TRIES):
            try:
                program, saved = _trained_saving(make, limit)
                saved_bytes = saved_bytes or saved
                yield f"save_on_disk {limit}", program
                break
            except LimitTooSmallError as error:
                limit = max(error.limit_bytes + 1, error.smallest_bytes)
        else:
            raise RuntimeError(f"no limit holds at {share} of the saved activations")


def _trained_saving(make: Callable[[], Program], limit: int | None) -> tuple[Program, int]:
    from elastrain.offload import save_on_disk

    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="elastrain-programs-"))
        offload = save_on_disk(_told(make, folder), min_bytes=1, memory_limit=limit)
        stack.callback(offload.close)

        def offloaded() -> Program:
            program = make()
            computed = program.loss

            def loss(batch: Any) -> Tensor:
                with offload:
                    return computed(batch)

            program.loss = loss  # type: ignore[method-assign]
            return program

        _, program = next(plain(offloaded))
        last = offload.stats().last
        return program, last.saved_bytes if last is not None else 0


def _told(program: Program | Callable[[], Program], folder: str) -> str:
    return os.path.relpath(folder) if getattr(program, "relative", False) else folder


def digest(program: Program, *, states: bool) -> str:
    """Return a digest of parameters, buffers, options of the groups and what is kept; `states`: the optimizer's too."""
    found = hashlib.sha256()
    _add(found, "model", program.model.state_dict())
    groups = [{k: v for k, v in group.items() if k != "params"} for group in program.optimizer.param_groups]
    _add(found, "groups", groups if states else [float(group["lr"]) for group in groups])
    _add(found, "kept", dict(program.kept()))
    if states:
        for name, p in program.model.named_parameters():
            _add(found, name, dict(program.optimizer.state.get(p, {})))
    return found.hexdigest()[:16]


def _add(found: Any, name: str, thing: Any) -> None:
    if isinstance(thing, nn.Module):
        thing = thing.state_dict()
    if isinstance(thing, Tensor) and not thing.is_meta:
        flat = thing.detach().contiguous().cpu().reshape(-1)
        found.update(f"{name} {thing.dtype} {tuple(thing.shape)}".encode())
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    elif isinstance(thing, dict):
        for key in sorted(thing, key=str):
            _add(found, f"{name}.{key}", thing[key])
    elif isinstance(thing, list | tuple):
        for number, each in enumerate(thing):
            _add(found, f"{name}.{number}", each)
    else:
        found.update(f"{name} {thing!r}".encode())
