"""One variant with its model and batch: what is asked of it in its own process. Nothing is compared here."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastrain.offload import ActivationOffload, LimitTooSmallError, OffloadConfig
from elastrain.offload.activations.hooks import MIN_BYTES
from elastrain.offload.drives.posix import PosixEngine
from experiments.offload.memory import Account, peak_allocated_bytes, peak_rss_bytes
from experiments.offload.models import Model, Shape, build, plainly
from experiments.offload.variants import ONLY_ON_DISK, TorchSave, run, step
from tests.support.faulty_engines import ThrottledEngine


@dataclass(frozen=True, kw_only=True)
class Case:
    """A variant, its model and its circumstances. `bytes_per_s` slows the drive down to that."""

    name: str
    kind: str
    shape: Shape
    directory: Path
    device: str = "cpu"
    limit_bytes: int | None = None
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    deterministic: bool = True
    min_bytes: int = MIN_BYTES
    bytes_per_s: float | None = None
    optimizer: bool = False


def zero(model: Model) -> None:
    """Zero, but kept: gradients are no activations and must not count as such."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()


class Worker:
    """What a process can be asked for."""

    def __init__(self, case: Case) -> None:
        torch.set_num_threads(1)
        if case.device == "cuda":
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # see torch.use_deterministic_algorithms
            torch.use_deterministic_algorithms(True)
        self._case = case
        model, tokens = build(case.kind, case.shape, case.dtype)
        self._model, self._tokens = model.to(case.device), tokens.to(case.device)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4) if case.optimizer else None
        self._coarse = TorchSave(case.directory, only_on_disk=case.name == ONLY_ON_DISK)
        self._offload = _offload(case) if case.name == "ours" else None

    def time(self) -> dict[str, float]:
        """Seconds of one step: wall, and processor of the training thread and of all others, as the kernel counts.

        Getting memory is the kernel's time of the training thread; checksums and Python are the others' own.
        """
        zero(self._model)
        self._until_done()
        before, began_s = _processor_s(), time.perf_counter()
        self._train()
        self._until_done()
        wall_s = time.perf_counter() - began_s
        return {"wall_s": wall_s, **{name: now_s - before[name] for name, now_s in _processor_s().items()}}

    def digest(self) -> str:
        """The digest of the gradients of the last step, bit for bit."""
        found = hashlib.sha256()
        for parameter in self._model.parameters():
            assert parameter.grad is not None
            found.update(parameter.grad.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        return found.hexdigest()

    def memory(self) -> dict[str, int] | None:
        """The rise of the resident set (CUDA: of what is allocated) in one step, and ours' account of it; None if the
        limit is too small.
        """
        measured = peak_rss_bytes if self._case.device == "cpu" else peak_allocated_bytes
        try:
            zero(self._model)
            rss_bytes = measured(self._train)
        except LimitTooSmallError:
            return None
        last = self._offload.stats().last if self._offload is not None else None
        return {"rss_bytes": rss_bytes, "account_bytes": 0 if last is None else last.peak_bytes}

    def account(self) -> int:
        """The most that saved storages take when everything is kept, by an account that is not ours."""
        account = Account(list(self._model.parameters()), self._case.min_bytes)
        zero(self._model)
        step(self._model, self._tokens, plainly, account.around(), autocast=self._case.autocast)
        return account.peak_bytes

    def stats(self) -> dict[str, Any]:
        """What the offload did."""
        assert self._offload is not None
        stats = self._offload.stats()
        assert stats.last is not None
        return {
            "spilled_share": stats.last.spilled_bytes / stats.last.saved_bytes,
            "peak_bytes": stats.last.peak_bytes,
            "save_stall_s": stats.last.save_stall_s,
            "need_stall_s": stats.last.need_stall_s,
            "storages": len(stats.last.lifetimes),
            "amount": stats.amount,
        }

    def _until_done(self) -> None:
        if self._case.device == "cuda":
            torch.cuda.synchronize()

    def _train(self) -> None:
        run(
            self._case.name,
            self._model,
            self._tokens,
            offload=self._offload,
            coarse=self._coarse,
            autocast=self._case.autocast,
        )
        if self._optimizer is not None:
            self._optimizer.step()


def _processor_s() -> dict[str, float]:
    """What this thread and this process took so far."""
    own, all_threads = resource.getrusage(resource.RUSAGE_THREAD), resource.getrusage(resource.RUSAGE_SELF)
    return {
        "thread_s": time.thread_time(),
        "thread_kernel_s": own.ru_stime,
        "others_s": all_threads.ru_utime - own.ru_utime,
        "others_kernel_s": all_threads.ru_stime - own.ru_stime,
    }


def _offload(case: Case) -> ActivationOffload:
    config = OffloadConfig(
        dirs=(str(case.directory),),
        memory_limit=case.limit_bytes,
        deterministic=case.deterministic,
        min_bytes=case.min_bytes,
    )
    if case.bytes_per_s is None:
        return ActivationOffload(config)
    return ActivationOffload(
        config, engines=[ThrottledEngine(PosixEngine(case.directory), bytes_per_s=case.bytes_per_s)]
    )
