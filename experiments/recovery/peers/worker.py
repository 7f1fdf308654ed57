"""What the peers' training programs share: the loop's data, a journal of who computes when, and the kill.

Everything here is alike for all peers; what makes one of them itself is in its own program.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.baselines.workload import Batch, Workload, member_share, step_batches
from experiments.train_gpt.data import Windows
from experiments.train_gpt.model import Block, next_token_loss

VICTIM = 1
"""The rank, or replica, that kills itself."""
_FATAL_STEP, _FATAL_MICRO_BATCH = 4, 1
"""Of the victim's own life, counted from 0: late enough for its links and its optimizer to be warm. The first step from
this one on in which all members take part."""


class Journal:
    """Lines of JSON in the order in which they happened; each is there before the next thing happens."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._fd = os.open(folder / f"{rank}-{os.getpid()}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **fields: float) -> None:
        os.write(self._fd, json.dumps({"t": time.monotonic(), "event": event, **fields}).encode() + b"\n")


@dataclass(frozen=True, kw_only=True)
class Share:
    """One member's part of every step. As many kills as asked for, over all lives of the victim."""

    folder: Path
    kills: int
    rank: int
    members: int
    work: Workload
    pace_s: float = 0.0
    """Each micro-batch waits so long beside its computing, as for an accelerator."""

    def batches(self, windows: Windows, order: Sequence[int], step: int) -> list[Batch]:
        share = member_share(self.work.micro_batches, rank=self.rank, members=self.members)
        return step_batches(windows, order, self.work, step=step, share=share)


class Trainer:
    """Forward and backward of a member's micro-batches, journalled block by block.

    A tick is written whenever a transformer block has been computed, forward or backward. A member that waits for
    others inside its backward writes none, so that the time between two ticks of anybody is a standstill of all.
    """

    def __init__(self, share: Share, model: nn.Module, all_take_part: Callable[[], bool] = lambda: True) -> None:
        self.journal = Journal(share.folder, share.rank)
        self._share = share
        self._all_take_part = all_take_part
        self._windows = Windows("train", context=share.work.context)
        generator = torch.Generator().manual_seed(share.work.seed)
        self._order = torch.randperm(len(self._windows), generator=generator).tolist()
        self._own_step, self._micro_batch = 0, 0
        for module in model.modules():
            if isinstance(module, Block):
                module.register_forward_hook(self._on_forward)

    def accumulate(self, model: nn.Module, step: int, no_sync: Callable[[], AbstractContextManager[None]]) -> None:
        """Gradients of the mean over this member's micro-batches; the last one's backward talks to the others."""
        self.journal.write("attempt")
        batches = self._share.batches(self._windows, self._order, step)
        for self._micro_batch, batch in enumerate(batches):
            time.sleep(self._share.pace_s)
            with nullcontext() if batch is batches[-1] else no_sync():
                loss = next_token_loss(model, batch) / len(batches)
                loss.backward()  # type: ignore[no-untyped-call]

    def stepped(self, step: int, *, share: float = 1.0) -> None:
        """The step is behind this member; `share`: how much of the global batch was computed in it."""
        self.journal.write("step", step=step, share=share)
        self._own_step += 1

    def _on_forward(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self.journal.write("tick")
        if output.requires_grad:
            output.register_hook(self._on_backward)  # type: ignore[no-untyped-call]

    def _on_backward(self, gradient: Tensor) -> None:
        self.journal.write("tick")
        here = self._own_step >= _FATAL_STEP and self._micro_batch == _FATAL_MICRO_BATCH
        if here and self._share.rank == VICTIM and self._all_take_part():
            self._die()

    def _die(self) -> None:
        number = len(list(self._share.folder.glob("killed-*")))
        if number < self._share.kills:
            (self._share.folder / f"killed-{number}").touch()
            self.journal.write("kill")
            os.kill(os.getpid(), signal.SIGKILL)


def share_of(parser: argparse.ArgumentParser) -> tuple[Share, argparse.Namespace]:
    """The command line that all peers' programs have; `parser` may know more."""
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--kills", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--members", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, default=Workload.micro_batches)
    parser.add_argument("--pace-s", type=float, default=0.0)
    args = parser.parse_args()
    work = Workload(micro_batch_size=args.micro_batch_size, micro_batches=args.micro_batches)
    share = Share(
        folder=args.folder,
        kills=args.kills,
        rank=args.rank,
        members=args.members,
        work=work,
        pace_s=args.pace_s,
    )
    torch.set_num_threads(1)
    torch.manual_seed(work.seed + share.rank)
    return share, args


def command(share_folder: Path, *, kills: int, members: int, micro_batch_size: int) -> list[str]:
    """The arguments that `share_of` reads, but for the rank."""
    options = {"folder": share_folder, "kills": kills, "members": members, "micro-batch-size": micro_batch_size}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]
