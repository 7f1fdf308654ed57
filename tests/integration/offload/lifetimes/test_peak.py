"""The kernel's peak of a whole process that trains within a limit, the steps before there is a plan included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastrain.offload.lifetimes import within as module
from elastrain.offload.lifetimes.piece_store import PieceStore
from elastrain.offload.lifetimes.pieces.pages import PagePool
from experiments.lifetimes.figures import SMALL, peak_of_plain
from experiments.lifetimes.worker import Case, Worker
from experiments.offload.models import Shape, build
from experiments.offload.processes import Process
from tests.integration.offload.lifetimes.touching import NothingBesides

STEPS = 8


@pytest.mark.on_demand
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
def test_the_peak_is_not_above_the_limit(kind: str, share: float, tmp_path: Path) -> None:
    limit_bytes = int(share * peak_of_plain(kind, SMALL, tmp_path))
    process = Process(Worker, Case(way="ours", kind=kind, shape=SMALL, directory=tmp_path, limit_bytes=limit_bytes))
    for _ in range(STEPS):
        process.ask("step")
    peak_bytes = process.ask("peak_bytes")
    process.close()
    assert peak_bytes <= limit_bytes


class GrowingProcess(NothingBesides):
    """A meter of a process that holds more and more besides: of the point that begins, and of all of them."""

    def __init__(self, model_bytes: int) -> None:
        self.custody: PieceStore | None = None
        self.besides_bytes = self.most_bytes = 0
        self._model_bytes = model_bytes  # before pieces hold it

    def own_bytes(self) -> tuple[int, int]:
        held_bytes = self._model_bytes if self.custody is None else self.custody.accounted_bytes() + self.besides_bytes
        return held_bytes, held_bytes

    def forget_peak(self) -> None:
        self.most_bytes = max(self.most_bytes, self.own_bytes()[0])


def test_what_a_process_holds_besides_may_grow_under_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pieces leave for it, also those that the plan has stay."""
    model, _ = build("gpt", Shape(width=128, layers=6, tokens=32, batch=2, vocabulary=256))
    model_bytes = sum(each.nbytes for each in model.parameters())
    limit_bytes, meter = 2 * model_bytes, GrowingProcess(model_bytes)
    monkeypatch.setattr(module, "memory_for", lambda _model, limit_bytes: (PagePool(limit_bytes), meter))
    optimizer = torch.optim.AdamW(model.parameters())
    training = module.within(model, optimizer, dirs=[str(tmp_path)], memory_limit=limit_bytes)
    meter.custody = training._custody
    for step in range(8):
        model(torch.full((2, 32), step)).backward()
        training.step(max_grad_norm=1.0)
        meter.besides_bytes += (step > 3) * limit_bytes // 16
    training.close()
    assert 0.9 * limit_bytes < meter.most_bytes <= limit_bytes
