"""A `transformers.Trainer` that trains in a job: `from elastrain.integrations.transformers import Trainer`.

The job is one process to transformers. `per_device_train_batch_size` is the size of a micro-batch, and a step has
`gradient_accumulation_steps` of them, which the members share out. So no number depends on how many members there are.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import RandomSampler, SequentialSampler

import elastrain
from elastrain.errors import ConfigError
from elastrain.integrations.adapter import begin_behind, claim, current_device, kept_checkpoint, require
from elastrain.integrations.process_state import (
    LONG_WORK_TIMEOUT_S,
    know_elastrain,
    say_shares,
    set_rank,
    settle_config,
)
from elastrain.integrations.shared_evaluation import shared_forwards, shared_predictions
from elastrain.integrations.trainer_state import CarriedState, agreed_checkpoint, modes_kept
from elastrain.runtime.job import Job
from elastrain.runtime.loop.step import Step

MINIMUM = "5.0"

transformers: Any = require("transformers", MINIMUM)
know_elastrain()

_REFUSED: Mapping[str, str] = {
    "deepspeed": "the job shards the optimizer's state itself",
    "fsdp": "the job shards the optimizer's state itself",
    "parallelism_config": "members share out micro-batches; `elastrain run --stages` makes pipelines",
    "ddp_backend": "the job has connections of its own, and no process group",
    "auto_find_batch_size": "the batch must not depend on a member's memory",
    "enable_jit_checkpoint": "the other members go on after a loss; `elastrain run --checkpoint-dir` is for the rest",
    "push_to_hub": "push the model once training has ended",
    "torch_empty_cache_steps": "empty the cache in a callback",
}
"""Arguments that have no meaning in a job, and why."""
_OVERRIDDEN = ("training_step", "get_train_dataloader", "get_batch_samples")
"""Methods that this trainer never calls, so that a subclass would override them in vain."""
_STEPS = ("prediction_step", "compute_loss")
"""Methods that have no effect besides what they return, where they are the library's."""


class Trainer(transformers.Trainer):  # type: ignore[misc]  # the class is known at run time only
    """A `transformers.Trainer` whose `train` is a job's loop. It takes the same arguments and callbacks.

    Members share the batches of an evaluation. The main member writes checkpoints, and a successor writes them anew if
    it is lost. Logs for tensorboard and wandb are written once for each step, whichever member is lost.

    Args:
        *args: Arguments of `transformers.Trainer`.
        job: Job that the script has made by `elastrain.init`, to choose its settings. Default: a job with `args.seed`.
        **kwargs: Arguments of `transformers.Trainer`.

    Raises ConfigError for an argument that has no meaning in a job, and names it.
    """

    control: Any
    lr_scheduler: Any
    _tr_loss: torch.Tensor
    _created_lr_scheduler: bool

    def __init__(self, *args: Any, job: Job | None = None, **kwargs: Any) -> None:
        claim("elastrain.integrations.transformers.Trainer")
        given = kwargs.get("args") or (args[1] if len(args) > 1 else None) or transformers.TrainingArguments()
        if len(args) > 1:
            args = (args[0], given, *args[2:])
        else:
            kwargs["args"] = given
        _check(given, type(self), kwargs)
        self.job = job or elastrain.init(seed=given.seed, loss_scale="dynamic" if given.fp16 else None)
        set_rank(self.job.rank)
        if given.device.type != "cpu":
            given.__dict__["_setup_devices"] = current_device()
            given._n_gpu = 1
        self._loggers = _loggers(given)
        super().__init__(*args, **kwargs)
        # The job has a bar of its own, which goes on when the main member is lost.
        self.remove_callback(transformers.ProgressCallback)
        self.add_callback(transformers.PrinterCallback)
        self._step: Step | None = None
        self._carried = CarriedState(self)

    def is_world_process_zero(self) -> bool:
        """Return True on the main member."""
        return self.job.is_main

    def is_local_process_zero(self) -> bool:
        """Return True on the main member."""
        return self.job.is_main

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `transformers.Trainer.train` does. A member that joins later resumes from the same checkpoint.

        Raises ConfigError for a trial of a search, and on a second call.
        """
        if args[:1] not in ((), (None,)) or kwargs.get("trial") is not None:
            raise ConfigError("a job trains one model: search for hyperparameters with transformers.Trainer")
        if resume_from_checkpoint is True:
            resume_from_checkpoint = agreed_checkpoint(self.args.output_dir)
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            resume_from_checkpoint = kept_checkpoint(resume_from_checkpoint)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train over the steps of the job, with callbacks, evaluations and checkpoints between two of them."""
        loader = self._loader()
        batches = _EpochBatches(self.train_dataset, loader.steps_per_epoch * args.gradient_accumulation_steps)
        epochs, per_epoch, _, samples, _, _, max_steps = self.set_initial_training_values(args, batches)
        self._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        behind = self._begin(loader, max_steps, resume_from_checkpoint)
        start = time.time()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        for step in self.job.steps(loader, until=max_steps - behind):
            self._step = step
            self._tell_place()
            epoch = self.state.global_step // per_epoch
            if self.state.global_step % per_epoch == 0:
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            for inputs in step:
                self._train_micro_batch(step, inputs)
            if step.is_overruled:  # the others have ended before it
                continue
            self._tell_place()
            rate = self._after(step, per_epoch)
            told = (self._tr_loss, step.grad_norm, self.model, trial, epoch, ignore_keys_for_eval, start)
            self._maybe_log_save_evaluate(*told, learning_rate=rate)
            if self.state.global_step % per_epoch == 0 or self.control.should_training_stop:
                self.control = self.callback_handler.on_epoch_end(args, self.state, self.control)
                self._maybe_log_save_evaluate(*told, learning_rate=rate)
            if self._is_to_stop():
                break
        return self._finalize_training(trial, samples, start)

    def _begin(self, loader: elastrain.DataLoader, max_steps: int, checkpoint: str | None) -> int:
        """Prepare the job from the script's checkpoint. Returns the trainer's steps that come before its step 0."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.create_scheduler(num_training_steps=max_steps)
        self._load_optimizer_and_scheduler(checkpoint)
        behind = begin_behind(self.job, self.state.global_step)
        loader.go_on_behind(0 if self.args.ignore_data_skip else behind)
        # It wraps the forward in autocast as it does without a job.
        self.model_wrapped = model = self.accelerator.prepare_model(self.model)
        settle_config(self.model)
        self.job.loggers(*self._loggers, behind=behind + 1)  # it counts the steps that are done
        self.job.register("trainer", self._carried)
        self.job.prepare(model, self.optimizer, loader, max_grad_norm=self.args.max_grad_norm or None)
        if self.job.is_main:
            say_shares(loader.micro_batches, self.job.world_size, "a larger gradient_accumulation_steps")
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = loader
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss = torch.zeros((), dtype=torch.float64)
        self._total_loss_scalar = 0.0
        return behind

    def _train_micro_batch(self, step: Step, inputs: Any) -> None:
        """Compute one micro-batch. Its weight is its number of tokens, where transformers counts them."""
        self.model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        seen = self.state.num_input_tokens_seen
        self._track_num_input_tokens(inputs)
        step.add("input tokens", self.state.num_input_tokens_seen - seen)
        self.state.num_input_tokens_seen = seen
        step.add("flos", float(self.floating_point_ops(inputs)))
        inputs = self._prepare_inputs(inputs)
        items = self._get_num_items_in_batch([inputs], self.args.device)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(self.model_wrapped, inputs, num_items_in_batch=items)
        step.backward(loss, weight=1 if items is None else items)

    def _after(self, step: Step, per_epoch: int) -> float:
        """Do what comes after a committed step, and return its learning rate."""
        self.current_flos += step.sums["flos"]
        self.state.num_input_tokens_seen += int(step.sums["input tokens"])
        is_finite = torch.isfinite(torch.tensor(step.loss))
        if is_finite or not self.args.logging_nan_inf_filter:
            self._tr_loss += step.loss
        else:
            self._tr_loss += self._tr_loss / (1 + self.state.global_step - self._globalstep_last_logged)
        for _ in range(self.args.gradient_accumulation_steps - 1):
            self.control = self.callback_handler.on_substep_end(self.args, self.state, self.control)
        self.control = self.callback_handler.on_pre_optimizer_step(self.args, self.state, self.control)
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        rate = float(self._get_learning_rate())
        if not step.skipped and not isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        return rate

    def _is_to_stop(self) -> bool:
        """Return True if a callback ends training. Raises ConfigError if it ends only the epoch."""
        if self.control.should_epoch_stop and not self.control.should_training_stop:
            raise ConfigError("a callback ends an epoch early, but a job goes through its data in order: end training")
        return bool(self.control.should_training_stop)

    def _tell_place(self) -> None:
        """Tell transformers whether this is the main member now."""
        set_rank(self.job.rank)
        self.state.is_world_process_zero = self.state.is_local_process_zero = self.job.is_main

    def _loader(self) -> elastrain.DataLoader:
        """Return the loader of the job, with the order that the training sampler stands for."""
        dataset, collate = self.train_dataset, self.data_collator
        if dataset is None:
            raise ConfigError("training needs a train_dataset")
        if isinstance(dataset, torch.utils.data.IterableDataset):
            raise ConfigError(
                "train_dataset is read in order (an IterableDataset), and this trainer finds samples by their index: "
                "give it a dataset with a length, or write a loop with elastrain.DataLoader(streams=…)"
            )
        if hasattr(dataset, "column_names"):
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        sampler, given, size = self._get_train_sampler(), self.args, self.args.per_device_train_batch_size
        is_own = not isinstance(sampler, RandomSampler | SequentialSampler | None)
        if given.train_sampling_strategy == "batch_rebalance":
            raise ConfigError(
                "train_sampling_strategy='batch_rebalance' makes micro-batches of several sizes: choose another"
            )
        return elastrain.DataLoader(
            dataset,
            global_batch_size=size * given.gradient_accumulation_steps,
            micro_batch_size=size,
            shuffle=None if is_own else isinstance(sampler, RandomSampler),
            sampler=sampler if is_own else None,
            collate_fn=collate,
            num_workers=given.dataloader_num_workers,
            prefetch_factor=given.dataloader_prefetch_factor,
            pin_memory=given.dataloader_pin_memory,
            persistent_workers=given.dataloader_persistent_workers,
            drop_last=given.dataloader_drop_last,
            generator=None if given.data_seed is None else torch.Generator().manual_seed(given.data_seed),
        )

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the library does. Members share the forwards. The modes of all layers are as before then."""
        with modes_kept(self.model), self._shared(dataloader) as loader:
            return super().evaluation_loop(loader, *args, **kwargs)

    def _shared(self, loader: Any) -> AbstractContextManager[Any]:
        """Return a context in which the members share the evaluation of a loader, which it yields."""
        if self._step is None or self.args.batch_eval_metrics:  # these ask the loader for its end, batch by batch
            return nullcontext(loader)
        if all(getattr(type(self), name) is getattr(transformers.Trainer, name) for name in _STEPS):
            return shared_predictions(self, loader)
        return shared_forwards(self.job, self.model, loader, lambda: self.is_in_train)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `transformers.Trainer.evaluate` does."""
        with self.job.phase("evaluation", LONG_WORK_TIMEOUT_S):
            return super().evaluate(*args, **kwargs)  # type: ignore[no-any-return]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict as `transformers.Trainer.predict` does."""
        with self.job.phase("prediction", LONG_WORK_TIMEOUT_S):
            return super().predict(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save on the main member while the others wait. If it is lost meanwhile, its successor saves anew."""
        self.store_flos()
        self._carried.note_saved(self.args.output_dir)
        with self.job.phase("checkpoint", LONG_WORK_TIMEOUT_S), self.job.main_first(LONG_WORK_TIMEOUT_S):
            self._tell_place()
            if self.job.is_main:
                super()._save_checkpoint(model, trial)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log as `transformers.Trainer.log` does, and write each value of a step once for the whole job."""
        super().log(logs, start_time)
        if self._loggers and self._step is not None:
            line = transformers.integrations.integration_utils.rewrite_logs(logs)
            self.job.log(self._carried.without_told(line))


class _EpochBatches:
    """The size of the training data, as transformers counts it in batches."""

    def __init__(self, dataset: Any, count: int) -> None:
        self.dataset = dataset
        self._count = count

    def __len__(self) -> int:
        return self._count


def _check(args: Any, kind: type[Trainer], kwargs: Mapping[str, Any]) -> None:
    """Raise ConfigError for arguments and overridden methods that have no meaning in a job."""
    for name, why in _REFUSED.items():
        if (value := getattr(args, name, None)) not in (None, False, [], ""):
            raise ConfigError(
                f"TrainingArguments({name}={value!r}) has no meaning in a job, because {why}: leave it out"
            )
    for name in _OVERRIDDEN:
        if getattr(kind, name) is not getattr(transformers.Trainer, name):
            raise ConfigError(
                f"{kind.__name__} overrides {name}, which a job does not call: override compute_loss, data_collator or "
                "train_dataset instead"
            )
    if kwargs.get("model_init") is not None:
        raise ConfigError("model_init is for searches over hyperparameters, and a job trains one model: pass model=")


def _loggers(args: Any) -> Sequence[Any]:
    """Return the job's loggers for what `report_to` names, and leave nothing in it. Raises ConfigError for others."""
    named = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or ())
    found: list[Any] = []
    for name in named:
        if name == "tensorboard":
            place = os.environ.get("TENSORBOARD_LOGGING_DIR") or os.path.join(args.output_dir, "runs")
            found.append(elastrain.TensorBoard(place))
        elif name == "wandb":
            project = os.environ.get("WANDB_PROJECT") or getattr(args, "project", None) or "huggingface"
            found.append(elastrain.Wandb(project, dir=args.output_dir, name=args.run_name))
        elif name != "none":
            raise ConfigError(
                f"report_to={name!r} cannot go on when the member that writes is lost: choose tensorboard, wandb or "
                "none"
            )
    args.report_to = []
    return found
