"""One way to train one model, in a process of its own: asked for one step at a time. Nothing is compared here."""

from __future__ import annotations

import gc
import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from elastrain.offload.drives.device import Device
from elastrain.offload.drives.port import IoEngine
from elastrain.offload.drives.posix import PosixEngine
from elastrain.offload.lifetimes.pieces import process_heap
from elastrain.offload.lifetimes.pieces.cuda import host_tier
from elastrain.offload.lifetimes.pieces.process_heap import KernelMeter
from elastrain.offload.lifetimes.within import TrainingWithin, within
from elastrain.offload.planning.plan_search import Policy
from experiments.lifetimes.policies import ON_DEMAND, ZERO_INFINITY
from experiments.offload.models import Shape, build
from tests.support.faulty_engines import ThrottledEngine

POLICIES = {"ours": Policy(), "zero": ZERO_INFINITY, "demand": ON_DEMAND}
RECOMPUTED = ("zero", "demand")


@dataclass(frozen=True, kw_only=True)
class Case:
    """`way` is "plain" or a policy; `bytes_per_s` slows each drive down to that."""

    way: str
    kind: str
    shape: Shape
    directory: Path
    limit_bytes: int = 0
    bytes_per_s: float | None = None
    drives: int = 1
    dtype: torch.dtype = torch.float32
    accumulated: int = 1
    host_bytes: int = 0
    """Of host memory, as a tier: besides the limit, and not in the peak."""


class PeakMeter:
    """The kernel's peak over the whole life of the process, although ours lets it begin anew at each point."""

    def __init__(self) -> None:
        self._meter = KernelMeter()
        self._most_bytes = 0
        forget = KernelMeter.forget_peak

        def keep_and_forget(meter: KernelMeter) -> None:
            self._look()
            forget(meter)

        KernelMeter.forget_peak = keep_and_forget  # type: ignore[method-assign]  # the judge looks before it is reset
        gc.collect()
        process_heap.trim()
        forget(self._meter)
        self._base_bytes = self._meter.own_bytes()[0]

    def peak_bytes(self) -> int:
        """The most, above what the process held before there was a model."""
        self._look()
        return self._most_bytes - self._base_bytes

    def begin_anew(self) -> None:
        """Forget what was."""
        self._meter.forget_peak()
        self._most_bytes = 0

    def _look(self) -> None:
        self._most_bytes = max(self._most_bytes, self._meter.own_bytes()[1])


class Worker:
    """What a process can be asked for."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        self._case = case
        warm_up()
        self._peak = PeakMeter()
        self._model, _ = build(case.kind, case.shape, case.dtype)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=3e-4)
        self._training = self._within() if case.way != "plain" else None
        self._batch = 0
        torch.manual_seed(7)

    def step(self) -> dict[str, float]:
        """Seconds of one step, processor seconds of its thread, and what the plan predicts that it ran under."""
        plan = {} if self._training is None else self._training.figures()
        predicted = {name: plan[name] for name in ("predicted_s", "predicted_written_bytes") if name in plan}
        began_s, thread_s = time.perf_counter(), time.thread_time()
        for _ in range(self._case.accumulated):
            self._loss().backward()
        end_step(self._model, self._optimizer, self._training)
        return {"wall_s": time.perf_counter() - began_s, "thread_s": time.thread_time() - thread_s, **predicted}

    def digest(self) -> str:
        """Of all parameters and optimizer states, bit for bit."""
        if self._training is None:
            return self._digest()
        with self._training.whole():
            return self._digest()

    def peak_bytes(self) -> int:
        """The kernel's peak since the process began, above what Python and torch take."""
        return self._peak.peak_bytes()

    def figures(self) -> dict[str, Any]:
        """What ours predicts and did."""
        if self._training is None:
            return {}
        reason = self._training.reason.replace(str(self._case.directory), "the drive")
        return {"reason": reason, **self._training.figures()}

    def _digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self._model.parameters():
            state = self._optimizer.state[parameter]
            for each in (parameter, *(value for value in state.values() if isinstance(value, Tensor))):
                found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()

    def _loss(self) -> Tensor:
        shape = self._case.shape
        generator = torch.Generator().manual_seed(self._batch)
        tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), generator=generator)
        self._batch += 1
        found: Tensor = self._model(tokens, computed_again) if self._case.way in RECOMPUTED else self._model(tokens)
        return found

    def _within(self) -> TrainingWithin:
        case = self._case
        drives: list[IoEngine] = [PosixEngine(case.directory) for _ in range(case.drives)]
        if case.bytes_per_s is not None:
            drives = [ThrottledEngine(each, bytes_per_s=case.bytes_per_s) for each in drives]
        engines: list[IoEngine | Device] = [*drives]
        if case.host_bytes:
            engines.append(host_tier(case.host_bytes))
        return within(
            self._model,
            self._optimizer,
            dirs=[str(case.directory)],
            memory_limit=case.limit_bytes,
            engines=engines,
            policy=POLICIES[case.way],
        )


def computed_again(block: nn.Module, *inputs: Tensor) -> Tensor:
    """How a model runs its blocks whose values are dropped, and made anew in backward."""
    found: Tensor = checkpoint(block, *inputs, use_reentrant=False)
    return found


def warm_up() -> None:
    """What torch takes for itself at the first step is no part of any limit."""
    model, tokens = build("gpt", Shape(width=64, layers=2, tokens=16, batch=2))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(tokens).backward()
        end_step(model, optimizer, None)


def end_step(model: nn.Module, optimizer: torch.optim.Optimizer, training: TrainingWithin | None) -> None:
    """Clip to a norm of 1, update, and forget the gradients: plainly, or within a limit."""
    if training is not None:
        training.step(max_grad_norm=1.0)
        return
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
