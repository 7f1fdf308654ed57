"""A strategy for Lightning: `Trainer(strategy=ElastrainStrategy(), accelerator="cpu")` under `elastrain run`.

Lightning's loop runs on every member alike, and counts as it does on one device. `accumulate_grad_batches` batches of
the training loader are one step of the job. The work of a step is done in the last of these batches: the job hands its
micro-batches out, and each member computes some of them by Lightning's own closure. The batches before it are empty.
A member that joins later gets the place of the loop with the job's state, and goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

import elastrain
from elastrain.base.environment import read_environment
from elastrain.base.processes import say
from elastrain.integrations.adapter import begin_behind, claim, kept_checkpoint, require

require("lightning", "2.5")

from lightning.fabric.utilities.rank_zero import rank_zero_only  # noqa: E402 - after its version was checked
from lightning.pytorch.callbacks import Callback, ModelCheckpoint  # noqa: E402
from lightning.pytorch.loops.optimization.automatic import ClosureResult  # noqa: E402
from lightning.pytorch.strategies import SingleDeviceStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

from elastrain.integrations.lightning_figures import StepLines, captured, log_sums  # noqa: E402
from elastrain.integrations.lightning_limits import check_loader, check_trainer, one_optimizer  # noqa: E402
from elastrain.integrations.lightning_place import GlobalBatch, LightningBatches, LoopPlace  # noqa: E402
from elastrain.integrations.shared_evaluation import ReadAhead, SharedForwards  # noqa: E402

EVALUATION_TIMEOUT_S = 3600.0
_ENDLESS = 1 << 62


class ElastrainStrategy(SingleDeviceStrategy):
    """Trains as one elastic job over all members. Make it before the model, since it seeds the generators.

    The whole batch of a step is `batch_size` of the training loader times `accumulate_grad_batches`, however many
    members there are. Validation runs on every member, and the members share the forwards; test runs on each alike.

    Args:
        micro_batch_size: Samples that a member computes at once. Default: `batch_size` of the training loader.
        seed: Seed of the job. Call `seed_everything` after the strategy is made, or not at all.
        evaluation_timeout: Seconds that one validation may take.
        options: Other arguments of `elastrain.init`, such as `backups=2`.

    Raises:
        ConfigError: An argument is bad, or this process uses another adapter.
    """

    strategy_name = "elastrain"

    def __init__(
        self,
        *,
        micro_batch_size: int | None = None,
        seed: int = 0,
        evaluation_timeout: float = EVALUATION_TIMEOUT_S,
        **options: Any,
    ) -> None:
        super().__init__()
        claim("elastrain.integrations.lightning.ElastrainStrategy")
        self.job = elastrain.init(seed=seed, **options)
        self._micro_batch_size = micro_batch_size
        self._evaluation_timeout_s = evaluation_timeout
        self._phases = ExitStack()
        self._trainer: Any = None
        self._batches: LightningBatches | None = None
        self._micro_batch: Any = None
        self._loss: Tensor | None = None
        self._refresh_rank()

    @property
    def is_global_zero(self) -> bool:
        """True on the member of rank 0 in the current view."""
        return self.job.is_main

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True: all micro-batches of a step are computed in the last of its batches."""
        return True

    def _refresh_rank(self) -> None:
        self.global_rank = self.local_rank = rank_zero_only.rank = self.job.rank
        self.world_size = self.job.world_size

    def setup_environment(self) -> None:
        """Check what Lightning is to do, and let all members' loggers write to the same folder."""
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self._trainer = self.lightning_module.trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return
        check_trainer(trainer, self.lightning_module)
        environment = read_environment()
        for logger in trainer.loggers if environment.agent else ():
            if getattr(logger, "_version", "") is None:  # each member would take the next number that is free
                logger._version = environment.job
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint):  # a member that comes later would find its own job's file
                callback._enable_version_counter = False
            if hasattr(callback, "_swap_models"):  # of WeightAveraging: it copies, while peers read the parameters
                callback._swap_models = partial(_swap_memory, callback)
        trainer.callbacks.insert(0, _End(self))
        self._lines = StepLines(self.job, trainer.loggers)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make optimizer and schedulers. Raises ConfigError unless there is one optimizer."""
        with one_optimizer():
            super().setup_optimizers(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        """Join the job with the training loader, and return what counts its batches. Others are read a bit ahead."""
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if not trainer.training:
            ahead: ReadAhead = ReadAhead(dataloader, lambda: self._most_batches(ahead), super().batch_to_device)
            return ahead
        check_loader(dataloader)
        assert isinstance(dataloader, DataLoader) and dataloader.batch_size is not None
        assert self.lightning_module is not None
        loader = self._loader(dataloader, trainer.accumulate_grad_batches)
        behind = begin_behind(self.job, trainer.global_step)
        loader.go_on_behind(behind)
        self._lines.begin(behind)
        self.job.prepare(
            self.lightning_module, self.optimizers[0], loader, max_grad_norm=trainer.gradient_clip_val or None
        )
        place = LoopPlace(trainer)
        place.note()
        self.job.register("Lightning's loop", place)
        for number, callback in enumerate(trainer.callbacks):
            for name, thing in vars(callback).items():
                if isinstance(thing, nn.Module):
                    self.job.register(f"{name} of {type(callback).__name__} {number}", thing)
        ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
        ends += [trainer.max_epochs * loader.steps_per_epoch] if (trainer.max_epochs or -1) >= 0 else []
        until = max(0, min(ends, default=_ENDLESS) - behind)
        self._batches = LightningBatches(self, loader, dataloader.batch_size, place, until)
        return self._batches

    def _loader(self, given: DataLoader[Any], accumulated: int) -> elastrain.DataLoader:
        """Return the job's loader of the same samples."""
        assert given.batch_size is not None
        size = given.batch_size * accumulated
        count = len(given.sampler)  # type: ignore[arg-type] # the samplers of a loader with a batch size have a length
        if left_out := count % size:
            say(
                f"the last {left_out} of {count} samples of an epoch do not fill a batch of {size}, and are left out: "
                "each epoch leaves out others if the loader shuffles"
            )
        sampler = given.sampler
        is_plain = isinstance(sampler, SequentialSampler) or (
            isinstance(sampler, RandomSampler) and not sampler.replacement
        )
        order: dict[str, Any] = {"shuffle": isinstance(sampler, RandomSampler)} if is_plain else {"sampler": sampler}
        return elastrain.DataLoader(
            given.dataset,
            global_batch_size=size,
            micro_batch_size=self._micro_batch_size or given.batch_size,
            collate_fn=given.collate_fn,
            num_workers=given.num_workers,
            prefetch_factor=given.prefetch_factor,
            timeout=given.timeout,
            worker_init_fn=given.worker_init_fn,
            generator=given.generator,
            drop_last=True,
            **order,
        )

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device. What stands for a whole batch stays as it is."""
        return batch if isinstance(batch, GlobalBatch) else super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Compute this member's micro-batches of the step, by Lightning's closure, until the step is committed."""
        assert self._batches is not None and self._batches.step is not None and self.lightning_module is not None
        loop, step = self._trainer.fit_loop.epoch_loop, self._batches.step
        result = ClosureResult(closure_loss=None)
        if not loop._should_accumulate():
            for batch in step:
                self._micro_batch = super().batch_to_device(self.precision_plugin.convert_input(batch))
                closure()
            self._micro_batch = self._loss = None
            optimizer._opt_called = True  # or torch warns that schedulers step first
            log_sums(self.lightning_module, step)
            result = ClosureResult(closure_loss=torch.tensor(step.loss))
        closure._result = result  # type: ignore[attr-defined] # the closure is Lightning's own
        return None if result.loss is None else result.loss

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's `training_step` with the present micro-batch, and collect what it logs."""
        assert self._batches is not None and self._batches.step is not None
        with captured(self.lightning_module, self._batches.step):
            output = super().training_step(self._micro_batch, *args[1:], **kwargs)
        self._loss = output["loss"] if isinstance(output, dict) else output
        if self._loss is None:
            raise elastrain.ConfigError(
                "training_step returned None, and ElastrainStrategy cannot leave a micro-batch out: return a loss that "
                "is 0 times the other one"
            )
        return output

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the backward of the undivided loss of the micro-batch, because the job divides by their number."""
        assert self._batches is not None and self._batches.step is not None
        assert self._loss is not None and self.lightning_module is not None
        self.precision_plugin.pre_backward(closure_loss, self.lightning_module)
        self._batches.step.backward(self._loss)
        self.precision_plugin.post_backward(closure_loss, self.lightning_module)
        return closure_loss

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load what the checkpoint was when the first member of the job has read it."""
        return super().load_checkpoint(kept_checkpoint(checkpoint_path), *args, **kwargs)  # type: ignore[no-any-return]

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: `save_checkpoint` asks for the state, on the member that writes."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write the file on one member, while the others wait. If that member is lost, its successor writes it."""
        with self.job.main_first(self._evaluation_timeout_s):
            self._refresh_rank()
            if not self.job.is_main:
                return
            if "optimizer_states" in checkpoint:
                checkpoint["optimizer_states"] = [optimizer.state_dict() for optimizer in self.optimizers]
            if "://" in str(filepath):
                super().save_checkpoint(checkpoint, filepath, storage_options)
                return
            beside = Path(filepath).with_name(f".{Path(filepath).name}.{self.job.member}")
            super().save_checkpoint(checkpoint, beside, storage_options)
            beside.replace(filepath)  # so that a file of this name is whole

    def on_validation_start(self) -> None:
        """Say that the validation takes longer than a step, and share the forwards of the module or its children."""
        self._phases.enter_context(self.job.phase("validation", self._evaluation_timeout_s))
        loaders = [each for each in self._validation._combined_loader.flattened if isinstance(each, ReadAhead)]
        shared = SharedForwards(self.job, self.lightning_module, loaders, self._is_between)
        self._phases.enter_context(shared.entered())

    @property
    def _validation(self) -> Any:
        """Lightning's loop of the validation."""
        return self._trainer.fit_loop.epoch_loop.val_loop

    def _most_batches(self, loader: ReadAhead) -> int | None:
        """Return how many batches of a loader the validation takes, or None for all."""
        loop = self._validation
        most = loop.max_batches[next(i for i, each in enumerate(loop._combined_loader.flattened) if each is loader)]
        return int(most) if most != float("inf") else None

    def _is_between(self) -> bool:
        """Return True between two steps, where members may compute together."""
        step = None if self._batches is None else self._batches.step
        return (
            step is not None and not step.is_under_way and not step.is_overruled and not self._trainer.sanity_checking
        )

    def on_validation_end(self) -> None:
        """Take back what `on_validation_start` said."""
        self._phases.close()

    def end(self) -> None:
        """Leave the job's loop together with the other members."""
        if self._batches is not None:
            self._batches.end()
            self._refresh_rank()


class _End(Callback):
    """The first callback: others move parameters at the end, which only the job may do before."""

    def __init__(self, strategy: ElastrainStrategy) -> None:
        self._strategy = strategy

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the checkpoints that come now, while the members have the state, and leave the job's loop."""
        for callback in trainer.checkpoint_callbacks:
            callback.on_train_end(trainer, pl_module)
        self._strategy.end()


def _swap_memory(callback: Any, module: nn.Module) -> None:
    """Exchange the memory of the module's parameters and buffers with that of the callback's average."""
    average = callback._average_model.module
    theirs = chain(average.parameters(), average.buffers())
    for one, other in zip(chain(module.parameters(), module.buffers()), theirs, strict=True):
        one.data, other.data = other.data, one.data
