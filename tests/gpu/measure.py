"""Step times, memory and copies of one process: a plain loop, DistributedDataParallel, or a member of a job.

Writes what it has measured as JSON to `--out`, one object per kind and number of tokens.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

if __name__ == "__main__":  # as a script: make `tests` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from elastrain.device import device_of
from experiments.train_gpt.model import GPT, GPTConfig
from tests.gpu.copies import Copies
from tests.gpu.train import MODELS, Texts, loss_of, prepare_device

WARM = 3
"""Steps before those that are timed."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One measurement. Tokens are those of one member and step."""

    device: str
    model: str
    tokens: int
    micro_tokens: int
    deterministic: bool
    seconds: float
    """Time that the timed steps take together, roughly."""
    steps: int = 0
    """Number of timed steps; 0: as many as fit into `seconds`."""

    @property
    def config(self) -> GPTConfig:
        return MODELS[self.model]

    @property
    def micro_batch(self) -> int:
        """Sequences per micro-batch."""
        return max(1, self.micro_tokens // self.config.context)

    @property
    def micro_batches(self) -> int:
        """Micro-batches of one member and step."""
        return max(1, self.tokens // (self.micro_batch * self.config.context))

    def build(self) -> GPT:
        """Build the model on the device, in bfloat16."""
        with torch.device(self.device):
            return GPT(self.config).to(torch.bfloat16)


class Plain:
    """The plain loop: bfloat16 parameters, gradients summed in float32, fused AdamW on float32 masters."""

    def __init__(self, work: Work, *, ddp: bool) -> None:
        self.work = work
        torch.manual_seed(0)
        module = work.build() if not ddp or work.device != "late" else work.build().cpu()  # Gloo knows no test device
        self.device = next(module.parameters()).device
        self.parameters = list(module.parameters())
        self.model: torch.nn.Module = module
        if ddp:
            self.model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        else:
            for parameter in self.parameters:
                parameter.grad_dtype = torch.float32
        self.masters = [parameter.detach().float() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)
        texts = Texts(work.config)
        self.batches = [torch.stack([texts[0] for _ in range(work.micro_batch)]) for _ in range(work.micro_batches)]
        if self.device.type == "cuda":
            self.batches = [batch.pin_memory() for batch in self.batches]

    def step(self) -> None:
        """Compute one step, without waiting for the device."""
        for number, batch in enumerate(self.batches, 1):
            if isinstance(self.model, DistributedDataParallel):
                self.model.require_backward_grad_sync = number == len(self.batches)
            loss = loss_of(self.model, batch.to(self.device, non_blocking=True))
            (loss / len(self.batches)).backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        clip_grad_norm_(self.masters, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.masters)
        self.optimizer.zero_grad()
        self.model.zero_grad()


def plain(work: Work, ready: Callable[[], None], *, ddp: bool = False) -> dict[str, Any]:
    """Measure the plain loop, alone or behind DDP in a group of one rank."""
    port = device_of(torch.device(work.device))
    port.reset_peak_memory_stats()
    before = port.memory_allocated()[0]
    if ddp:
        _join_group("nccl" if work.device == "cuda" else "gloo")
    trainer = Plain(work, ddp=ddp)
    for _ in range(WARM):
        trainer.step()
    port.synchronize()
    began_s = time.perf_counter()
    trainer.step()
    port.synchronize()
    steps = work.steps or min(100, max(4, round(work.seconds / (time.perf_counter() - began_s))))
    ready()
    began_s = time.perf_counter()
    for _ in range(steps):
        trainer.step()
    port.synchronize()
    step_s = (time.perf_counter() - began_s) / steps
    found = {"step_s": step_s, "steps": steps, "peak_bytes": port.memory_allocated()[1] - before}
    return found | {"parameters": sum(map(Tensor.numel, trainer.masters)), "micro_batches": work.micro_batches}


@cache
def _join_group(backend: str) -> None:
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)


def member(work: Work, members: int, *, backups: int, noted: bool) -> dict[str, Any]:
    """Measure a member of a job, or a job of one. `noted`: follow its copies, too."""
    port = device_of(torch.device(work.device))
    port.reset_peak_memory_stats()
    before = port.memory_allocated()[0]
    host_before = _host_bytes(forget_peak=True)
    count = work.micro_batches
    job = elastrain.init(seed=0, run_length=count, backups=backups, deterministic=work.deterministic)
    loader = elastrain.DataLoader(
        Texts(work.config),
        global_batch_size=work.micro_batch * count * members,
        micro_batch_size=work.micro_batch,
        pin_memory=work.device == "cuda",
    )
    model = work.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    copies = Copies(port) if noted else None
    began_s = 0.0
    for step in job.steps(loader, until=WARM + work.steps):
        if step.number == WARM:
            port.synchronize()
            began_s = time.perf_counter()
            if copies is not None:
                copies.begin()
        for batch in step:
            mark = copies and copies.mark()
            step.backward(loss_of(model, batch.to(work.device, non_blocking=True)))
            if copies is not None:
                copies.computed(mark)
    port.synchronize()
    step_s = (time.perf_counter() - began_s) / work.steps
    found = {"step_s": step_s, "steps": work.steps, "peak_bytes": port.memory_allocated()[1] - before}
    found["host_bytes"] = _host_bytes() - host_before
    return found | (copies.figures(work.steps) if copies is not None else {})


def _host_bytes(*, forget_peak: bool = False) -> int:
    """Return the peak of this process's resident memory; or forget it, and return what is resident now."""
    if forget_peak:
        Path("/proc/self/clear_refs").write_text("5")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmRSS" if forget_peak else "VmHWM"].split()[0]) << 10


def _meet(folder: Path, members: int) -> None:
    """Wait for the other plain processes, so that all are timed at the same time."""
    (folder / f"ready-{os.getpid()}").touch()
    until_s = time.monotonic() + 60
    while len(list(folder.glob("ready-*"))) < members and time.monotonic() < until_s:
        time.sleep(0.005)


def measured(args: argparse.Namespace, work: Work) -> list[dict[str, Any]]:
    """Measure the kinds that the arguments ask for, in their order, each with the steps of the plain loop."""
    found: list[dict[str, Any]] = []
    ready = partial(_meet, args.out, args.members) if args.members > 1 else lambda: None
    for kind in args.kinds.split(","):
        if kind == "job":
            steps = work.steps or found[0]["steps"]
            one = member(Work(**{**vars(work), "steps": steps}), args.members, backups=args.backups, noted=args.copies)
        else:
            one = plain(work, ready, ddp=kind == "ddp")
        found.append({"kind": kind, "tokens": work.tokens, **one})
        gc.collect()  # DDP is a cycle
        if work.device == "cuda":
            torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--kinds", required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--tokens", required=True, help="numbers of tokens, with commas")
    parser.add_argument("--micro-tokens", type=int, required=True)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--members", type=int, default=1)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--copies", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prepare_device(args.device)
    torch.use_deterministic_algorithms(args.deterministic)
    found = []
    for tokens in map(int, args.tokens.split(",")):
        work = Work(
            device=args.device,
            model=args.model,
            tokens=tokens,
            micro_tokens=args.micro_tokens,
            deterministic=args.deterministic,
            seconds=args.seconds,
            steps=args.steps,
        )
        found += measured(args, work)
    (args.out / f"{os.getpid()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
