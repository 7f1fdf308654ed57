"""The place of Lightning's loop, as it travels to members that join later and into checkpoints of the job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import elastrain

if TYPE_CHECKING:
    from elastrain.integrations.lightning import ElastrainStrategy

_FX = "training_step"
_SAVED = ("_last_global_step_saved", "_last_checkpoint_saved")
"""Fields of a ModelCheckpoint that decide what it writes, and that are not in its state."""


class LoopPlace:
    """Counts, callbacks and sums of an epoch, as they were when the open step began. `job.register` takes it.

    The state is noted at one moment, because Lightning's counts go on while the step is under way.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._state: dict[str, Any] = {}
        self.is_news = False
        """True if the state came from another member, or from a checkpoint, and the loop has not taken it yet."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that was noted last."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state of another member, for `restore`."""
        self._state, self.is_news = state, True

    def note(self) -> None:
        """Note the loop's state as it is now."""
        loop, connector = self._trainer.fit_loop.epoch_loop, self._trainer._logger_connector
        zeroed = loop.automatic_optimization.optim_progress.optimizer.zero_grad
        zeroed.total.reset()  # one for each micro-batch of this member
        zeroed.current.reset()
        self._state = copy.deepcopy(
            {
                "counts": {name: progress.state_dict() for name, progress in self._counts().items()},
                "stepped": loop._batches_that_stepped,
                "saved": [
                    {name: getattr(each, name) for name in _SAVED} for each in self._trainer.checkpoint_callbacks
                ],
                "callbacks": {callback.state_key: callback.state_dict() for callback in self._trainer.callbacks},
                "metrics": dict(connector._callback_metrics),
                "sums": [_sum_of(metric) for metric in loop._results.values() if _is_carried(metric)],
            }
        )

    def restore(self) -> None:
        """Put the loop where the noted state is."""
        loop, connector = self._trainer.fit_loop.epoch_loop, self._trainer._logger_connector
        state = copy.deepcopy(self._state)
        self._forget_restart(self._trainer.fit_loop)
        for name, progress in self._counts().items():
            progress.load_state_dict(state["counts"][name])
        loop._batches_that_stepped = state["stepped"]
        for callback in self._trainer.callbacks:
            if kept := state["callbacks"].get(callback.state_key):
                callback.load_state_dict(kept)
                vars(callback).update(
                    {name: kept[name] for name in kept if name in vars(callback)}
                )  # it leaves some out
        for callback, kept in zip(self._trainer.checkpoint_callbacks, state["saved"], strict=True):
            vars(callback).update(kept)
        connector._callback_metrics.update(state["metrics"])
        for each in state["sums"]:
            self._put_sum(loop._results, each)
            connector._current_fx = _FX  # or the first log of the step would begin the epoch's sums anew

    def _forget_restart(self, loop: Any) -> None:
        """Let the loop go on from the job's place, and not from that of a checkpoint that this member has loaded."""
        loop._restarting = loop._loaded_from_state_dict = False
        for inner in vars(loop).values():
            if hasattr(inner, "_loaded_from_state_dict"):
                self._forget_restart(inner)

    @property
    def batch(self) -> int:
        """Number of batches of this epoch that are done."""
        return int(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _counts(self) -> dict[str, Any]:
        fit = self._trainer.fit_loop
        loop = fit.epoch_loop
        return {
            "epochs": fit.epoch_progress,
            "batches": loop.batch_progress,
            "schedulers": loop.scheduler_progress,
            "steps": loop.automatic_optimization.optim_progress,
            "validation": loop.val_loop.batch_progress,
        }

    def _put_sum(self, results: Any, kept: dict[str, Any]) -> None:
        value, size, options = kept["value"], kept["size"], kept["options"]
        options["reduce_fx"] = getattr(torch, options["reduce_fx"])
        results.log(_FX, value=value, batch_size=1, sync_dist_fn=self._trainer.strategy.reduce, **options)
        metric = results[f"{_FX}.{options['name']}"]
        metric.value = value
        if size is not None:
            metric.cumulated_batch_size = size


def _is_carried(metric: Any) -> bool:
    return bool(metric.meta.fx == _FX and metric.is_tensor)


def _sum_of(metric: Any) -> dict[str, Any]:
    meta = metric.meta
    names = ("name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")
    return {
        "options": {**{name: getattr(meta, name) for name in names}, "reduce_fx": meta.reduce_fx.__name__},
        "value": metric.value,
        "size": metric.cumulated_batch_size if meta.is_mean_reduction else None,
    }


@dataclass
class GlobalBatch:
    """A stand-in for a batch in Lightning's hooks, because no member has all samples of it.

    `samples` has one row without elements for each sample, from which Lightning reads the size of the batch.
    """

    samples: Tensor


class LightningBatches:
    """The batches of one epoch, over which Lightning's loop iterates. It begins the job's steps, one after another.

    `step`: the step that is open.
    """

    def __init__(
        self, strategy: ElastrainStrategy, loader: elastrain.DataLoader, samples: int, place: LoopPlace, until: int
    ) -> None:
        self._strategy = strategy
        self._place = place
        self._until = until
        self._trainer = strategy.lightning_module.trainer
        self._of_step: int = self._trainer.accumulate_grad_batches
        self._epoch_batches: int = loader.steps_per_epoch * self._of_step
        self._samples = samples
        self._steps: Iterator[Any] = strategy.job.steps(loader, until=until)
        self.step: Any = next(self._steps, None)  # the hooks of Lightning's start see the place of a job under way
        self._is_fresh = True
        if place.is_news:
            place.restore()

    def __len__(self) -> int:
        return self._epoch_batches

    def __iter__(self) -> Iterator[GlobalBatch]:
        at = 0 if self._place.is_news else self._place.batch  # a checkpoint may stand in an epoch, and in a step
        self._is_fresh &= at % self._of_step == 0
        while at < self._epoch_batches:
            if at % self._of_step == 0:
                self._begin()
                if self.step is None:
                    return
                if self._place.is_news:
                    at = self._move()
            yield GlobalBatch(torch.empty(self._samples, 0))
            at += 1

    def _begin(self) -> None:
        """Begin the next step, unless it was begun by joining the job."""
        if not self._is_fresh:
            self._strategy._lines.flush()
            self._place.note()
            self.step = next(self._steps, None)
        self._is_fresh = False
        self._strategy._refresh_rank()

    def _move(self) -> int:
        """Put Lightning's loop where the job is, and return the number of batches of the epoch that are done."""
        self._place.restore()
        self._place.is_news = False
        done = self._place.batch
        self._trainer.fit_loop._data_fetcher.fetched = done
        return done

    def end(self) -> None:
        """Wait for the other members behind the last step. Leave the loop if Lightning stops earlier."""
        self._strategy._lines.flush()
        steps, self._steps = self._steps, iter(())
        if self.step is not None and self.step.number + 1 < self._until:
            steps.close()  # type: ignore[attr-defined] # it is a generator
        else:
            next(steps, None)
