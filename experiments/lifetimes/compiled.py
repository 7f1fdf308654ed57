"""`python -m experiments.lifetimes.compiled`: compiled models that offload against the same without, step by step.

Both live in one process and take turns, so that a busy machine slows both down. Peaks are the kernel's, or those of
CUDA's allocator, above what was there when a step began, without the gradients that both make.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from experiments.offload.allocator import with_that_allocator

if TYPE_CHECKING:
    from elastrain.offload.lifetimes.pieces.piece_memory import MemoryMeter

LIMIT_SHARE = 0.3
"""Of what one forward saves."""


@dataclass(kw_only=True)
class Way:
    """One compiled model. Its steps are noted: seconds, seconds of the training thread, bytes."""

    model: Any
    run: Callable[..., Any]
    meter: MemoryMeter
    around: AbstractContextManager[Any]
    wall_s: list[float] = field(default_factory=list)
    thread_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)
    saved_bytes: list[int] = field(default_factory=list)

    def step(self, tokens: Any) -> None:
        """Forward and backward; the gradients stay."""
        meter = self.meter
        for each in self.model.parameters():
            each.grad = None
        gc.collect()
        meter.forget_peak()
        before, began_s, thread_s = meter.own_bytes()[0], meter.clock(), time.thread_time()
        with self.around:
            loss = self.run(tokens)
        self.saved_bytes.append(meter.own_bytes()[0] - before)
        loss.backward()
        self.wall_s.append(meter.clock() - began_s)
        self.thread_s.append(time.thread_time() - thread_s)
        gradients = sum(each.nbytes for each in self.model.parameters())
        self.peak_bytes.append(meter.own_bytes()[1] - before - gradients)

    def digest(self) -> str:
        """Of all gradients, bit for bit."""
        import hashlib

        found = hashlib.sha256()
        for each in self.model.parameters():
            found.update(each.grad.contiguous().view(-1).cpu().numpy().tobytes())
        return found.hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class CompiledCase:
    """One model with one compiler. With `host_bytes`, what leaves goes to so much host memory instead of the drive."""

    kind: str
    below: str
    device: str
    width: int
    layers: int
    tokens: int
    batch: int
    steps: int
    host_bytes: int = 0


def measure(case: CompiledCase, directory: str) -> dict[str, Any]:
    """Both ways of one case."""
    import torch
    from torch._dynamo.utils import counters

    from elastrain.device import device_of
    from elastrain.offload.activations.hooks import ActivationOffload, OffloadConfig
    from elastrain.offload.compiling.backend import elastrain
    from elastrain.offload.lifetimes.pieces.cuda import CudaMeter, host_tier
    from elastrain.offload.lifetimes.pieces.process_heap import KernelMeter
    from experiments.offload.models import Shape, build

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(case.device == "cuda")
    torch._dynamo.reset()
    counters.clear()
    steps, below = case.steps, case.below
    shape = Shape(width=case.width, layers=case.layers, tokens=case.tokens, batch=case.batch)
    meter = CudaMeter(device_of(torch.device("cuda"))) if case.device == "cuda" else KernelMeter()

    def made(backend: Any, around: AbstractContextManager[Any], **more: Any) -> Way:
        with torch.device(case.device):
            model, _ = build(case.kind, shape)
        run = torch.compile(model, backend=backend, fullgraph=True, **more)
        return Way(model=model, run=run, around=around, meter=meter)

    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), device=case.device)
    plain = made(below, nullcontext())
    plain.step(tokens)
    plain.step(tokens)
    config = OffloadConfig(dirs=(directory,), memory_limit=int(LIMIT_SHARE * plain.saved_bytes[-1]))
    offload = ActivationOffload(config, engines=[host_tier(case.host_bytes)] if case.host_bytes else None)
    ours = made(elastrain, offload, options={"backend": below})
    for way in (plain, ours) * steps:
        torch.manual_seed(5)
        way.step(tokens)
    found = {
        **asdict(case),
        "compiled_bits_equal": plain.digest() == ours.digest(),
        "graphs": counters["stats"]["unique_graphs"],
        "graph_breaks": sum(counters["graph_break"].values()),
        "compiled_peak_ratio": round(_of(ours.peak_bytes, steps) / _of(plain.peak_bytes, steps), 3),
        "compiled_time_ratio": round(_of(ours.wall_s, steps) / _of(plain.wall_s, steps), 3),
        "thread_time_ratio": round(_of(ours.thread_s, steps) / _of(plain.thread_s, steps), 3),
        "plain_s": round(_of(plain.wall_s, steps), 3),
        "plain_peak_mib": round(_of(plain.peak_bytes, steps) / 2**20, 1),
        "after_forward_ratio": round(_of(ours.saved_bytes, steps) / _of(plain.saved_bytes, steps), 3),
    }
    offload.close()
    return found


def _of(values: Sequence[float], steps: int) -> float:
    """The median of the last two thirds: programs are compiled and the amount is learned before."""
    return statistics.median(values[-max(1, steps * 2 // 3) :])


def main() -> None:
    """Each model with each compiler, one line of JSON each."""
    with_that_allocator("experiments.lifetimes.compiled")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="gpt")
    parser.add_argument("--backends", default="aot_eager,inductor")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shape", default="384,256,4", help="width, tokens and batch")
    parser.add_argument("--host", type=float, default=0, help="GiB of host memory, for values instead of a drive")
    given = parser.parse_args()
    width, tokens, batch = map(int, given.shape.split(","))
    for kind in given.kinds.split(","):
        for below in given.backends.split(","):
            case = CompiledCase(
                kind=kind,
                below=below,
                device=given.device,
                width=width,
                layers=given.layers,
                tokens=tokens,
                batch=batch,
                steps=given.steps,
                host_bytes=int(given.host * 2**30),
            )
            with tempfile.TemporaryDirectory(dir=given.dir) as folder:
                found = measure(case, folder)
            print(json.dumps({**found, "machine": platform.machine()}), flush=True)


if __name__ == "__main__":
    main()
