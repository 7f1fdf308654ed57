"""A stack of paced blocks: each computes its real, small tensors and then sleeps until its stated time is over.

    python experiments/pipeline/train.py --steps 5 --micro-batches 8 --window-ms 60

The forward of every block, the gradient of its input and those of its weights last `--window-ms` each, in whatever
actions they are computed; with 0 nothing sleeps, and the bits are the same. With `--plan` the job computes by the plans
of that file (see `steering.py`). Lines go to `steps-<member>.txt` in the run's folder: step, loss and gradient norm,
and at the end the digest of the whole model; to `parameters-<member>.txt`: step, parameter that the member has, digest.
Each member's overshoots, in seconds, go to `overshoot-<member>.txt`, its processor time in the last line; with
`--count-bytes`, the bytes of live tensors after each step go to `bytes-<member>.txt`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":  # as a script: make `elastrain` importable from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import elastrain
from experiments.memory import MemoryAccount, own_memfd_bytes
from experiments.pipeline.present import lines_of
from experiments.pipeline.steering import steer

WIDTH, BLOCKS, SIZE = 32, 8, 4


class Pace:
    """Deadlines: what computing takes inside of a window does not show, what it takes beyond is an overshoot."""

    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self.overshoots_s: list[float] = []
        self.began_s = 0.0

    def begin(self) -> None:
        self.began_s = time.monotonic()

    def end(self) -> None:
        if not self.window_s:
            return
        until_s = self.began_s + self.window_s
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(left_s if left_s > 0.002 else left_s / 2)
        self.overshoots_s.append(time.monotonic() - until_s)

    def whole(self) -> None:
        """Sleep for a window: what has been computed for it was short."""
        self.begin()
        self.end()


class _When(torch.autograd.Function):
    """Call something where a block's backward begins, at its output, or ends, at its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, called: Callable[[], None]) -> Tensor:
        ctx.called = called
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.called()
        return gradients[0], None


class PacedBlock(nn.Module):
    def __init__(self, pace: Pace, width: int) -> None:
        super().__init__()
        self.pace = pace
        self.shift = nn.Parameter(torch.zeros(width))  # so that the first block has a gradient for its input, too
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        self.pace.begin()
        # The window of the weights: a split backward enters the branch of the shift with them, a whole one at its end.
        x = _When.apply(x + _When.apply(self.shift, self.pace.whole), self.pace.end)
        x = _When.apply(x + self.dropout(self.down(F.gelu(self.up(x)))), self.pace.begin)
        self.pace.end()
        return x


class PacedStack(nn.Module):
    def __init__(self, pace: Pace, width: int, *, checkpointed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(PacedBlock(pace, width) for _ in range(BLOCKS))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return x


class Samples(torch.utils.data.Dataset[Tensor]):
    """Seeded per sample by the loader."""

    def __init__(self, width: int, rows: int) -> None:
        self._shape = (rows, width) if rows else (width,)

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(self._shape)


def go_first() -> None:
    """Give all threads of this process real-time priority, where the kernel permits it."""
    # Not from its start on, which takes seconds of a processor: that would disturb jobs which are timed already.
    for thread in os.listdir("/proc/self/task"):
        with suppress(PermissionError, ProcessLookupError):
            os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))


def has_computed(folder: Path, member: str) -> bool:
    journal = folder / "members" / f"{member}.jsonl"
    return journal.exists() and '"event": "task"' in journal.read_text()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--run-length", type=int, default=1)
    parser.add_argument("--backups", type=int, default=1)
    parser.add_argument("--window-ms", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--checkpointed", action="store_true")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--rows", type=int, default=0, help="so many rows per sample, for large boundary tensors")
    parser.add_argument("--plan", type=Path, help="a file with the plans of the job")
    parser.add_argument("--slow-until", help="hold steps up until this member has computed a task")
    parser.add_argument("--count-bytes", action="store_true")
    args = parser.parse_args()
    account = MemoryAccount(external=own_memfd_bytes) if args.count_bytes else None
    torch.set_num_threads(1)
    if args.plan is not None:
        steer(args.plan)
    job = elastrain.init(seed=3, run_length=args.run_length, backups=args.backups)
    pace, dtype = Pace(args.window_ms / 1000), getattr(torch, args.dtype)
    model = PacedStack(pace, args.width, checkpointed=args.checkpointed).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples, global_batch_size = Samples(args.width, args.rows), SIZE * args.micro_batches
    loader = elastrain.DataLoader(samples, global_batch_size=global_batch_size, micro_batch_size=SIZE, num_workers=0)
    model, optimizer, loader = job.prepare(model, optimizer, loader, max_grad_norm=1.0)
    folder, me = Path(os.environ["ELASTRAIN_RUN_DIR"]), os.environ.get("ELASTRAIN_MEMBER", "alone")
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    live_bytes: list[int] = []
    with (
        (folder / f"steps-{me}.txt").open("w", buffering=1) as lines,
        (folder / f"parameters-{me}.txt").open("w", buffering=1) as parameters,
    ):
        for step in job.steps(loader, until=args.steps):
            for batch in step:
                batch = batch.to(dtype)
                if args.slow_until and me != "alone" and not has_computed(folder, args.slow_until):
                    time.sleep(0.1)
                step.backward((model(batch).float() - batch.float().flip(1)).square().mean())
            lines.write(f"{step.number} {step.loss!r} {step.grad_norm!r}\n")
            if account is not None:
                live_bytes.append(account.live_bytes())
            else:
                parameters.writelines(lines_of(model, step.number))
            if step.number == 0 and args.plan is not None and args.window_ms:
                go_first()
            if step.number == 0:  # the tracing pass and whole runs lie behind: from here on is measured
                pace.overshoots_s.clear()
                began_s, began_cpu_s = time.monotonic(), time.process_time()
        lines.write(f"end digest {job.digest()}\n")
    cpu = (time.process_time() - began_cpu_s) / (time.monotonic() - began_s)
    (folder / f"bytes-{me}.txt").write_text("\n".join(map(str, live_bytes)))
    (folder / f"overshoot-{me}.txt").write_text("\n".join(map(repr, [*pace.overshoots_s, cpu])))


if __name__ == "__main__":
    main()
