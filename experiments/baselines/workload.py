"""The work that every trainer under comparison does, and how it is timed and weighed: alike for all of them.

A trainer is anything with `step(batches) -> loss`. Nothing here knows which framework stands behind it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from experiments.memory import MemoryAccount
from experiments.train_gpt.data import Windows, batch_of
from experiments.train_gpt.model import SIZES

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One comparison's shape. All members together do `micro_batches` of `micro_batch_size` windows per step."""

    size: str = "tiny"
    micro_batch_size: int = 8
    micro_batches: int = 16
    steps: int = 6
    """Timed steps."""
    warmup_steps: int = 2
    """Steps before the timed ones: optimizer state, buckets and caches come into being."""
    lr: float = 1e-3
    seed: int = 0
    weigh: bool = True
    """Whether to take memory too, which costs one more step, under the profiler."""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup_steps < 1:
            raise ValueError(f"expected at least one warm-up and one timed step; got {self.warmup_steps}, {self.steps}")

    @property
    def context(self) -> int:
        return SIZES[self.size].context

    @property
    def total_steps(self) -> int:
        """Warm-up, timed, and the step that is weighed."""
        return self.warmup_steps + self.steps + self.weigh


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one member saw."""

    step_s: list[float]
    """Wall time of each timed step, loading of the batches included."""
    cpu_s: list[float]
    """Processor time of all of the member's threads in each timed step; loader processes are not included."""
    losses: list[float]
    """This member's mean loss, in nats, of each step from the first one on."""
    peak_bytes: int | None = None
    """Most tensor bytes live at once during one step."""
    resting_bytes: int | None = None
    """Tensor bytes live between two steps: parameters, gradients, optimizer state."""

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.step_s)

    @property
    def median_cpu_s(self) -> float:
        return statistics.median(self.cpu_s)


class Trainer(Protocol):
    """One member's side of a training step."""

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over this member's micro-batches; its mean loss, a scalar."""


class Barrier(Protocol):
    """What `measure` wants to start all members at once."""

    def wait(self) -> Any: ...


def member_share(micro_batches: int, *, rank: int, members: int) -> range:
    """The aligned run of micro-batches that a member computes. Raises ValueError if they do not divide evenly."""
    if micro_batches % members:
        raise ValueError(f"{micro_batches} micro-batches do not divide over {members} members: choose a multiple")
    each = micro_batches // members
    return range(rank * each, (rank + 1) * each)


def step_batches(windows: Windows, order: Sequence[int], work: Workload, *, step: int, share: range) -> list[Batch]:
    """This member's micro-batches of a step, taken from the endless repetition of `order`."""
    batches = []
    for index in share:
        first = (step * work.micro_batches + index) * work.micro_batch_size
        batches.append(batch_of(windows, (order[(first + k) % len(order)] for k in range(work.micro_batch_size))))
    return batches


def measure(
    work: Workload, make: Callable[[Workload], Trainer], *, share: range, start: Barrier, account: MemoryAccount
) -> Measurement:
    """Train, time the steps after the warm-up, then weigh one more. The trainer is made here, after the account."""
    trainer = make(work)
    windows = Windows("train", context=work.context)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(work.seed)).tolist()
    losses, step_s, cpu_s = [], [], []
    start.wait()
    for step in range(work.warmup_steps + work.steps):
        began, began_cpu = time.perf_counter(), time.process_time()
        loss = trainer.step(step_batches(windows, order, work, step=step, share=share))
        step_s.append(time.perf_counter() - began)
        cpu_s.append(time.process_time() - began_cpu)
        losses.append(loss.item())
    timed, timed_cpu = step_s[work.warmup_steps :], cpu_s[work.warmup_steps :]
    if not work.weigh:
        return Measurement(step_s=timed, cpu_s=timed_cpu, losses=losses)
    resting = account.live_bytes()
    with account.measure() as usage:
        trainer.step(step_batches(windows, order, work, step=work.total_steps - 1, share=share))
    return Measurement(step_s=timed, cpu_s=timed_cpu, losses=losses, peak_bytes=usage.peak_bytes, resting_bytes=resting)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a member process stands."""

    rank: int
    members: int
    folder: Path
    """Shared by the members of one run, gone after it."""


Entry = Callable[[Workload, Place, Barrier], Measurement]


def run_members(work: Workload, entry: Entry, *, members: int, timeout_s: float = 600) -> list[Measurement]:
    """Run `entry` in new processes with one intra-op thread each; the measurements in rank order.

    They are forked from a server that has torch imported already, which saves seconds per run. `entry` must be a
    function of a module. Raises what torch.multiprocessing raises when a member fails, and TimeoutError when they take
    longer than `timeout_s`; no member is left behind.
    """
    with tempfile.TemporaryDirectory(prefix="elastrain-baseline-") as name:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed.optim", "torch.profiler"])
        arguments = (work, entry, members, Path(name), context.Barrier(members))
        processes = start_processes(  # type: ignore[no-untyped-call]
            _member, args=arguments, nprocs=members, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + timeout_s
        while not processes.join(timeout=max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                for process in processes.processes:
                    process.kill()
                raise TimeoutError(f"{members} members did not finish within {timeout_s} s")
        files = [Path(name) / f"{rank}.json" for rank in range(members)]
        return [Measurement(**json.loads(file.read_text())) for file in files]


def _member(rank: int, work: Workload, entry: Entry, members: int, folder: Path, barrier: Barrier) -> None:
    torch.set_num_threads(1)
    found = entry(work, Place(rank=rank, members=members, folder=folder), barrier)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(found)))


def step_seconds(found: Sequence[Measurement]) -> float:
    """Seconds per step of a run: the mean over members of their medians."""
    return statistics.mean(one.median_step_s for one in found)


def cpu_seconds(found: Sequence[Measurement]) -> float:
    """Processor seconds per step of all members together: the sum of their medians."""
    return sum(one.median_cpu_s for one in found)


def heaviest(sizes_bytes: Iterable[int | None]) -> int | None:
    """The largest; None if nothing was weighed."""
    return max((size for size in sizes_bytes if size is not None), default=None)


def summary(found: Sequence[Measurement]) -> dict[str, Any]:
    """The figures of one run, ready for JSON."""
    return {
        "members": len(found),
        "step_s": step_seconds(found),
        "cpu_s": cpu_seconds(found),
        "peak_bytes": heaviest(one.peak_bytes for one in found),
        "resting_bytes": heaviest(one.resting_bytes for one in found),
        "last_loss": statistics.mean(one.losses[-1] for one in found),
        "steps_s": [one.step_s for one in found],
    }


def command_line(description: str | None, run: Callable[[Workload, int], list[Measurement]]) -> None:
    """`python -m experiments.baselines.<name>`: run once, print one JSON object."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--members", type=int, default=1, help="processes")
    parser.add_argument("--size", choices=SIZES, default=Workload.size)
    parser.add_argument("--steps", type=int, default=Workload.steps)
    parser.add_argument("--micro-batches", type=int, default=Workload.micro_batches)
    parser.add_argument("--micro-batch-size", type=int, default=Workload.micro_batch_size)
    args = parser.parse_args()
    work = Workload(
        size=args.size,
        steps=args.steps,
        micro_batches=args.micro_batches,
        micro_batch_size=args.micro_batch_size,
    )
    print(json.dumps(summary(run(work, args.members))))
