"""The losses of an evaluation of `Trainer`, of which each member computes some, in the order of the batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from elastrain.runtime.job import Job

_CHUNK = 128
"""Batches of one call of `job.evaluate`. Each batch tells a number for every batch of its call."""
_KINDS = (None, torch.float32, torch.float64, torch.bfloat16, torch.float16)


@contextmanager
def shared_losses(trainer: Any, loader: Any) -> Iterator[Any]:
    """Let the trainer's evaluation loop find the losses that the members compute together.

    Yields the loader for that loop, which has batches of the same sizes without data. If the loader's batches are not
    consecutive samples of a dataset that is read by index, or the loop needs the inputs, it is the loader as it is.
    """
    is_plain = isinstance(loader, DataLoader) and isinstance(loader.sampler, SequentialSampler)
    if not is_plain or loader.batch_size is None or loader.drop_last or trainer.args.include_for_metrics:
        yield loader
        return
    losses = _losses(trainer.job, loader, lambda batch: trainer_step(trainer, trainer.model, batch, True)[0])
    trainer_step = type(trainer).prediction_step
    vars(trainer)["prediction_step"] = lambda *_, **__: (next(losses), None, None)
    try:
        yield _counted(loader)
    finally:
        del vars(trainer)["prediction_step"]


def _losses(job: Job, loader: DataLoader[Any], loss_of: Callable[[Any], Tensor | None]) -> Iterator[Any]:
    """Yield the loss of each batch, or None where the batch has none. The values have the bits of one process."""
    assert loader.batch_size is not None
    size = loader.batch_size
    samples, collate = _Numbered(loader.dataset), loader.collate_fn
    count = -(-len(samples) // size)
    for first in range(0, count, _CHUNK):
        batches = range(first, min(first + _CHUNK, count))
        part = torch.utils.data.Subset(samples, range(first * size, min(batches.stop * size, len(samples))))

        def fn(given: tuple[int, Any], batches: range = batches) -> dict[str, Tensor]:
            at, batch = given
            loss = loss_of(batch)
            # All other places get 0 from this batch, so that adding keeps the bits.
            losses, kinds = torch.zeros(len(batches), dtype=torch.float64), torch.zeros(len(batches), dtype=torch.int64)
            if loss is not None:
                losses[at // size - batches.start] = loss.detach().double().cpu()
                kinds[at // size - batches.start] = _KINDS.index(loss.dtype)
            return {"losses": losses, "kinds": kinds}

        sums = job.evaluate(fn, part, batch_size=size, collate_fn=lambda got: (got[0][0], collate([s for _, s in got])))
        values, kinds = sums["losses"], sums["kinds"]
        assert isinstance(values, Tensor) and isinstance(kinds, Tensor)
        for value, kind in zip(values, kinds.tolist(), strict=True):
            yield value.to(_KINDS[kind]) if kind else None


def _counted(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a loader of as many batches of the same sizes, whose samples are not read."""
    zeros = range(len(loader.dataset))  # type: ignore[arg-type]  # it has a length, or it would not be shared
    made = lambda got: {"samples": torch.zeros(len(got))}  # noqa: E731
    return DataLoader(zeros, batch_size=loader.batch_size, collate_fn=made)  # type: ignore[arg-type]


class _Numbered(torch.utils.data.Dataset[tuple[int, Any]]):
    """The samples of a dataset with their numbers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return index, self._dataset[index]
