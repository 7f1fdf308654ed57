"""Refusals of the strategy for Lightning, each in one sentence, before any member waits for another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from elastrain.errors import ConfigError

_HOOKS = {
    "backward": "step.backward computes the backward of a micro-batch, so put what it does into training_step",
    "configure_gradient_clipping": "the job clips the gradient of the whole batch: pass gradient_clip_val",
    "on_before_optimizer_step": "no member has all gradients: watch them in on_after_backward",
    "on_before_batch_transfer": "no member has all micro-batches: do it in the loader's collate_fn",
}
"""Hooks of a LightningModule that would have no effect, or another one -> what to do instead."""
_CALLBACKS: dict[type, str] = {
    StochasticWeightAveraging: "use WeightAveraging or EMAWeightAveraging",
    GradientAccumulationScheduler: "every step of a job has the same size: pass accumulate_grad_batches",
    Timer: "members' clocks differ, and all have to stop after the same step: pass max_steps",
}
"""Callbacks that cannot work -> what to do instead."""
_PRECISIONS = (Precision, DoublePrecision, HalfPrecision, MixedPrecision)


def check_trainer(trainer: Any, module: Any) -> None:
    """Raise ConfigError, with one sentence, if the trainer or the module asks for what the strategy cannot do."""
    for reason in (*_of_module(module), *_of_trainer(trainer), *_of_callbacks(trainer.callbacks)):
        raise ConfigError(reason)


def _of_module(module: Any) -> Iterator[str]:
    if not module.automatic_optimization:
        yield (
            "ElastrainStrategy cannot do manual optimization, because the job computes micro-batches again after a "
            "loss: leave automatic_optimization True, or write the loop with elastrain.init()"
        )
    for hook, instead in _HOOKS.items():
        if is_overridden(hook, module):
            yield f"ElastrainStrategy does not call {type(module).__name__}.{hook}: {instead}"


def _of_trainer(trainer: Any) -> Iterator[str]:
    precision = trainer.precision_plugin
    refused = {
        f"accelerator={type(trainer.accelerator).__name__}": (
            not isinstance(trainer.accelerator, CPUAccelerator),
            "it trains on the CPU so far: pass accelerator='cpu'",
        ),
        f"the plugin {type(precision).__name__}": (
            type(precision) not in _PRECISIONS or getattr(precision, "scaler", None) is not None,
            "pass precision='32-true', '64-true', 'bf16-true' or 'bf16-mixed'",
        ),
        "gradient_clip_algorithm='value'": (
            bool(trainer.gradient_clip_val) and str(trainer.gradient_clip_algorithm).lower().endswith("value"),
            "the job clips by the norm of the whole gradient: leave it out",
        ),
        "sync_batchnorm=True": (
            trainer._accelerator_connector._layer_sync is not None,
            "BatchNorm normalises each micro-batch by itself: leave it out",
        ),
        "limit_train_batches, overfit_batches and fast_dev_run": (
            trainer.fast_dev_run or trainer.limit_train_batches != 1.0 or bool(trainer.overfit_batches),
            "an epoch is one pass over the data: use a torch.utils.data.Subset, or max_steps",
        ),
        "reload_dataloaders_every_n_epochs": (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "a job has one loader: leave it out",
        ),
        "a val_check_interval in time": (
            trainer._val_check_time_interval is not None,
            "members' clocks differ, and all validate after the same step: count batches",
        ),
    }
    for name, (is_used, instead) in refused.items():
        if is_used:
            yield f"ElastrainStrategy cannot work with {name}: {instead}"


def _of_callbacks(callbacks: list[Any]) -> Iterator[str]:
    for callback in callbacks:
        instead = next((words for kind, words in _CALLBACKS.items() if isinstance(callback, kind)), "")
        if isinstance(callback, ModelCheckpoint) and callback._train_time_interval is not None:
            instead = "train_time_interval goes by members' clocks, which differ: pass every_n_train_steps"
        if instead:
            yield f"ElastrainStrategy cannot work with the callback {type(callback).__name__}: {instead}"


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Raise ConfigError instead of Lightning's advice, to optimize manually, if the module makes several optimizers."""
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise ConfigError(
            "ElastrainStrategy takes one optimizer, and configure_optimizers returned several: put all parameters into "
            "groups of one optimizer"
        ) from None


def check_loader(loader: Any) -> None:
    """Raise ConfigError unless the job can share out the loader's batches."""
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"ElastrainStrategy takes a torch DataLoader for training; got {kind}")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "ElastrainStrategy cannot train on an IterableDataset: use a map-style dataset, or elastrain.init() with "
            "elastrain.DataLoader(streams=…)"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "ElastrainStrategy makes the batches itself: give the training loader a batch_size, and a sampler in place "
            "of a batch_sampler"
        )
