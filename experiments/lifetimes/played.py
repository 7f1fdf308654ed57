"""`python -m experiments.lifetimes.played`: the CPU plays a device, for who has none. One line of JSON for each case.

Storages are resized as on a device, and nobody looks at the process's memory while it trains: `within` knows what it
counts, and no more. The judge is the kernel's peak of each step. Seconds say nothing of a device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from experiments.offload.allocator import with_that_allocator

if TYPE_CHECKING:
    from elastrain.offload.lifetimes.pieces.piece_memory import MemoryMeter, MemoryPool

STEPS = 7
STAGING_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class PlayedCase:
    """`share` is the limit as a part of plain's peak; with `checkpoints` the model computes its blocks again itself."""

    kind: str
    share: float
    bytes_per_s: float
    checkpoints: bool


class AtOnce:
    """The mark of an accelerator that has done all that it was asked for."""

    def query(self) -> bool:
        """It is reached."""
        return True

    def synchronize(self) -> None:
        """Nothing is waited for."""


class OneLane:
    """`Lanes` without streams: who copies is done when he returns."""

    def mark(self) -> AtOnce:
        """All is done."""
        return AtOnce()

    @contextmanager
    def copying(self, mark: AtOnce) -> Iterator[None]:
        """Nothing is waited for."""
        yield


class PlayedMeter:
    """The kernel's counts, asked as a device's: when a plan is to be made, and not while there is one."""

    runs_ahead = True

    def __init__(self) -> None:
        from elastrain.offload.lifetimes.pieces.process_heap import KernelMeter

        self._kernel = KernelMeter()

    def own_bytes(self) -> tuple[int, int]:
        """What the process holds, and held at most since `forget_peak`."""
        return self._kernel.own_bytes()

    def forget_peak(self) -> None:
        """Begin anew."""
        self._kernel.forget_peak()

    def clock(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def keep_pace(self) -> None:
        """Nobody runs ahead here."""


def memory_of_a_device(_model: Any, _limit_bytes: int) -> tuple[MemoryPool, MemoryMeter]:
    """In place of `within.memory_for`. Staging memory is the host's, and shared, so that it is no part of the peak."""
    import torch

    from elastrain.offload.drives.host import shared_pages
    from elastrain.offload.drives.transfer import StagingPool
    from elastrain.offload.lifetimes.pieces.resized import ResizedPool

    staging = StagingPool(STAGING_BYTES, lambda size: torch.frombuffer(shared_pages(size), dtype=torch.uint8))
    return ResizedPool(torch.device("cpu"), OneLane(), staging), PlayedMeter()


def peaks(case: PlayedCase, limit_bytes: int | None) -> dict[str, Any]:
    """The peak of each step, in bytes: of plain training, or within a limit."""
    import torch

    from elastrain.offload.drives.posix import PosixEngine
    from elastrain.offload.lifetimes.pieces import process_heap
    from elastrain.offload.lifetimes.within import within
    from experiments.lifetimes.worker import PeakMeter, computed_again, end_step, warm_up
    from experiments.offload.models import Shape, build
    from tests.support.faulty_engines import ThrottledEngine

    torch.set_num_threads(1)
    warm_up()
    process_heap.give_back_what_is_freed()
    shape = Shape(width=384, layers=8, tokens=256, batch=8, vocabulary=512)
    meter, found = PeakMeter(), list[int]()
    model, _ = build(case.kind, shape)
    optimizer, training = torch.optim.AdamW(model.parameters(), lr=3e-4), None
    with tempfile.TemporaryDirectory() as folder:
        if limit_bytes is not None:
            engine = ThrottledEngine(PosixEngine(folder), bytes_per_s=case.bytes_per_s)
            with patch("elastrain.offload.lifetimes.within.memory_for", memory_of_a_device):
                training = within(model, optimizer, dirs=[folder], memory_limit=limit_bytes, engines=[engine])
        for step in range(STEPS if training else 2):
            meter.begin_anew()
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.tokens), generator=generator)
            (model(tokens, computed_again) if case.checkpoints else model(tokens)).backward()
            end_step(model, optimizer, training)
            found.append(meter.peak_bytes())
        if training is None:
            return {"peaks": found}
        again = training.figures()["computed_again"]
        training.abandon()
    return {"peaks": found, "computed_again": again}


def measure(case: PlayedCase) -> dict[str, Any]:
    """Plain and limited training, in processes of their own."""
    from experiments.offload.processes import apart

    limit_bytes = int(case.share * max(apart(peaks, case, None)["peaks"]))
    found = apart(peaks, case, limit_bytes)
    to_limit = [round(each / limit_bytes, 3) for each in found["peaks"]]
    return {**asdict(case), "limit_bytes": limit_bytes, "peak_to_limit": max(to_limit), "steps": to_limit} | {
        "computed_again": found["computed_again"]
    }


def main() -> None:
    """Each model, with and without checkpoints of its own, at each share."""
    with_that_allocator("experiments.lifetimes.played")
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", default="gpt,bert,t5")
    parser.add_argument("--shares", default="0.6,0.5")
    parser.add_argument("--rate", type=float, default=1e8, help="bytes per second of the drive")
    given = parser.parse_args()
    for kind in given.kinds.split(","):
        for checkpoints in (True, False):
            for share in map(float, given.shares.split(",")):
                case = PlayedCase(kind=kind, share=share, bytes_per_s=given.rate, checkpoints=checkpoints)
                print(json.dumps(measure(case)), flush=True)


if __name__ == "__main__":
    main()
