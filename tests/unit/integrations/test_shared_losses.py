"""Losses that members share keep the bits and the order of one process; what cannot be shared stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from elastrain.integrations import shared_losses as module
from elastrain.integrations.shared_losses import shared_losses

VALUES = torch.randn(29, generator=torch.Generator().manual_seed(3))


class FakeJob:
    """Computes all batches, from the last to the first, as if other members had had them."""

    def evaluate(
        self, fn: Callable[[Any], Any], dataset: Any, *, batch_size: int, collate_fn: Any
    ) -> dict[str, Tensor]:
        starts = range(0, len(dataset), batch_size)
        batches = [[dataset[i] for i in range(at, min(at + batch_size, len(dataset)))] for at in starts]
        found = [fn(collate_fn(batch)) for batch in reversed(batches)]
        return {name: sum((each[name] for each in found[1:]), found[0][name]) for name in found[0]}


class FakeTrainer:
    """A trainer of which only the evaluation of a batch is there."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.job, self.model, self.args = FakeJob(), None, SimpleNamespace(include_for_metrics=[])
        self._dtype = dtype

    def prediction_step(self, model: Any, inputs: Any, only_loss: bool) -> tuple[Any, None, None]:
        assert only_loss
        return None if self._dtype is None else inputs.mean().to(self._dtype), None, None


def _gathered(trainer: Any, loader: Any) -> list[Any]:
    with shared_losses(trainer, loader) as given:
        found = [trainer.prediction_step(None, batch, True)[0] for batch in given]
        sizes = [len(batch["samples"]) for batch in given] if given is not loader else None
    assert sizes in (None, [4] * 7 + [1])
    assert "prediction_step" not in vars(trainer)
    return found


@pytest.mark.parametrize("chunk", [2, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, None])
def test_losses_are_those_of_one_process(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype | None, chunk: int
) -> None:
    monkeypatch.setattr(module, "_CHUNK", chunk)
    loader = DataLoader(list(VALUES), batch_size=4)
    right = [FakeTrainer(dtype).prediction_step(None, batch, True)[0] for batch in loader]
    found = _gathered(FakeTrainer(dtype), loader)
    assert len(found) == len(right) == 8
    for ours, theirs in zip(found, right, strict=True):
        assert ours is theirs is None or (ours.dtype == theirs.dtype and torch.equal(ours, theirs))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(VALUES)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(list(VALUES), batch_size=4, shuffle=True),
        DataLoader(list(VALUES), batch_size=4, drop_last=True),
        DataLoader(Subset(list(VALUES), range(3)), batch_size=None),
        DataLoader(Endless(), batch_size=4),
        list(VALUES),
    ],
    ids=["shuffled", "a part", "no batches", "a stream", "no loader"],
)
def test_what_is_not_read_in_order_is_not_shared(loader: Any) -> None:
    with shared_losses(FakeTrainer(torch.float32), loader) as given:
        assert given is loader
