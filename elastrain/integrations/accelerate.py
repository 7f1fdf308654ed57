"""An `Accelerator` for scripts of accelerate: `from elastrain.integrations.accelerate import Accelerator`.

The job is one process to the script. A batch of the training loader is a micro-batch, and a step has
`gradient_accumulation_steps` of them, which the members share out. So no number depends on how many members there are.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import elastrain
from elastrain.errors import ConfigError
from elastrain.integrations.accelerator_arguments import PRECISIONS, check, steps_of, wanted
from elastrain.integrations.adapter import begin_behind, claim, current_device, kept_checkpoint, require
from elastrain.integrations.one_process import OneProcess
from elastrain.integrations.prepared import EvaluationLoader, Parts, Scheduler, TrainingLoader, job_loader, only
from elastrain.integrations.process_state import (
    ACCELERATE_MINIMUM,
    LONG_WORK_TIMEOUT_S,
    know_elastrain,
    say_shares,
    set_rank,
    settle_config,
)
from elastrain.integrations.script_loop import RememberedForward, ScriptLoop
from elastrain.integrations.shared_evaluation import ReadAhead, SharedForwards
from elastrain.integrations.trackers import Trackers
from elastrain.runtime.job import Job
from elastrain.runtime.loop.step import Step

accelerate: Any = require("accelerate", ACCELERATE_MINIMUM)
know_elastrain()

_POSITION = "elastrain.json"


class Accelerator(OneProcess):
    """The part of a script that `accelerate.Accelerator` is, over the steps of a job.

    Every member runs the bodies of the script's loops for each batch, and computes some of them. Files and logs are
    written by the main member, or by a successor.

    Args:
        mixed_precision: "no", "bf16" or "fp16".
        gradient_accumulation_steps: Batches of the training loader in a step, which the members share out.
        cpu: True to train on the CPU.
        log_with: "tensorboard", "wandb", "all", a logger of `job.loggers`, or a list of them.
        project_dir: Folder for logs.
        step_scheduler_with_optimizer: False if the script steps its scheduler between epochs.
        max_grad_norm: The limit that the script gives to `clip_grad_norm_`, if it does.
        job: Job that the script has made by `elastrain.init`, to choose its settings. Default: a job with seed 0.
        **others: Other arguments of `accelerate.Accelerator`. Those that have no meaning in a job are refused.

    Raises:
        ConfigError: An argument has no meaning in a job. The message names it.
    """

    def __init__(
        self,
        *,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        log_with: Any = None,
        project_dir: str | None = None,
        step_scheduler_with_optimizer: bool = True,
        max_grad_norm: float | None = None,
        job: Job | None = None,
        **others: Any,
    ) -> None:
        claim("elastrain.integrations.accelerate.Accelerator")
        self.mixed_precision = str(mixed_precision or "no")
        self.gradient_accumulation_steps = steps_of(gradient_accumulation_steps, others)
        check(others, self.mixed_precision)
        with_project = others.get("project_config")
        self._trackers = Trackers(wanted(log_with), project_dir or getattr(with_project, "project_dir", None))
        fp16 = self.mixed_precision == "fp16"
        self.job = job or elastrain.init(loss_scale="dynamic" if fp16 else None)
        self.state = accelerate.PartialState(cpu=cpu)
        set_rank(self.job.rank)
        self.device = current_device(cpu=cpu)
        self._with_optimizer, self._max_grad_norm = step_scheduler_with_optimizer, max_grad_norm
        self._parts = Parts()

    @property
    def is_playing_past(self) -> bool:
        """True on a member that goes through steps before its first one; see `ScriptLoop`."""
        return self._parts.loop is not None and self._parts.loop.is_playing_past

    distributed_type = accelerate.DistributedType.NO

    # ---- Training ----

    def prepare(self, *things: Any, **_: Any) -> Any:
        """Prepare a model, its optimizer, its schedulers and loaders; the first loader is the training loader.

        Raises ConfigError for a second model or optimizer, and for loaders whose order cannot be shared out.
        """
        found = tuple(self._prepare(thing) for thing in things)
        return found[0] if len(found) == 1 else found

    prepare_model = prepare_optimizer = prepare_scheduler = prepare_data_loader = prepare

    @property
    def sync_gradients(self) -> bool:
        """True in the body of the last batch of a step."""
        return self._parts.loop is None or self._parts.loop.is_sync

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[None]:
        """Return a context without effect: the step knows which batch is its last."""
        return nullcontext()

    no_sync = accumulate

    def autocast(self, *_: Any) -> AbstractContextManager[None]:
        """Return the context of the chosen precision."""
        kind = PRECISIONS[self.mixed_precision]
        return nullcontext() if kind is None else torch.autocast(self.device.type, kind)

    def backward(self, loss: Tensor, **_: Any) -> None:
        """Compute the backward of a batch's mean loss. Gradients are averaged over the batches of the step."""
        self._loop().backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Check that the job clips so, and return a tensor that has the norm once the step is committed."""
        if norm_type != 2 or max_norm != self._max_grad_norm:
            raise ConfigError(
                f"accelerator.clip_grad_norm_(…, {max_norm!r}) comes when gradients are on their way already: say "
                f"Accelerator(max_grad_norm={max_norm!r}) as well, and clip by the 2-norm"
            )
        norm = torch.full((), torch.nan)
        self._parts.norms.append(norm)
        if (step := self._loop().step) is not None and step.is_committed:
            self._fill_norms(step)
        return norm

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """True if the last step was committed without a change, for example because of an overflow."""
        step = None if self._parts.loop is None else self._parts.loop.step
        return step is not None and step.is_committed and step.skipped

    def unwrap_model(self, model: Any, *_: Any, **__: Any) -> Any:
        """Return the model: `prepare` wraps nothing around it."""
        return model

    def get_state_dict(self, model: nn.Module, *_: Any, **__: Any) -> dict[str, Any]:
        """Return the state of the model."""
        return model.state_dict()

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Begin in the middle of the epoch. Call it before the training loop; see `load_state`."""
        if not isinstance(dataloader, TrainingLoader):
            return accelerate.skip_first_batches(dataloader, num_batches)
        per_step, per_epoch = dataloader.inner.micro_batches, dataloader.inner.steps_per_epoch
        if num_batches % per_step or self._parts.loop is not None:
            raise ConfigError(
                f"skip_first_batches(…, {num_batches}) comes before the training loop, and skips whole steps of "
                f"{per_step} batches"
            )
        self._parts.behind += num_batches // per_step - self._parts.behind % per_epoch
        return dataloader

    # ---- Files ----

    def save(self, thing: Any, path: Any, *_: Any, **__: Any) -> None:
        """Save a thing on the main member."""
        if self.is_main_process:
            torch.save(thing, path)

    def register_for_checkpointing(self, *things: Any) -> None:
        """Put things into the states that are saved, and send them to members that join later."""
        for thing in things:
            self.job.register(f"object {len(self._parts.registered)} of register_for_checkpointing", thing)
            self._parts.registered.append(thing)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **_: Any) -> None:
        """Save the whole state as accelerate does, on the main member, while the others wait.

        If the main member is lost meanwhile, its successor saves. Raises ConfigError in the middle of a step.
        """
        if self.is_playing_past:
            return
        loop = self._loop()
        if output_dir is None or not loop.is_between:
            raise ConfigError(
                "accelerator.save_state(folder) needs a folder, and comes behind optimizer.step() where "
                "accelerator.sync_gradients is True, or outside of the training loop"
            )
        if loop.step is not None and loop.step.is_overruled:
            return
        with self.job.phase("checkpoint", LONG_WORK_TIMEOUT_S), self.job.main_first(LONG_WORK_TIMEOUT_S):
            set_rank(self.job.rank)
            if self.job.is_main:
                self._write_state(Path(output_dir), loop.committed, safe_serialization)

    def load_state(self, input_dir: str, *_: Any, **__: Any) -> None:
        """Load a state that `save_state` has written, before the training loop. Data goes on behind it.

        All members read it, also those that join later. Raises ConfigError in the loop.
        """
        if self._parts.loop is not None:
            raise ConfigError("accelerator.load_state(folder) comes before the training loop")
        parts, folder, states = self._parts, Path(kept_checkpoint(input_dir)), accelerate.checkpointing
        states.load_accelerator_state(folder, [parts.model], [parts.optimizer], parts.schedulers, [], 0)
        for index, thing in enumerate(self._parts.registered):
            states.load_custom_state(thing, folder, index)
        if (position := folder / _POSITION).exists():
            self._parts.behind = json.loads(position.read_text())["steps"]

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Any = None) -> None:
        """Name the job's loggers, before the training loop. Each line is written once, whichever member is lost."""
        self._trackers.name(project_name, config, init_kwargs)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values of the step that was committed last. Its number is the job's, whatever `step` says."""
        if not self.is_playing_past and self._trackers.loggers:
            self._trackers.log(self.job, self._loop(), values)

    def end_training(self) -> None:
        """End the job's loop, together with the other members. The end of the script does it, too."""
        if self._parts.loop is not None:
            self._parts.loop.close()

    def free_memory(self, *things: Any) -> Any:
        """Return None for each thing."""
        return [None for _ in things]

    clear = free_memory

    def __getattr__(self, name: str) -> Any:
        if hasattr(accelerate.Accelerator, name):
            raise ConfigError(f"accelerator.{name} is not there in a job of elastrain: leave it out")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ---- What prepare gives ----

    def _loop(self) -> ScriptLoop:
        if self._parts.loop is None:
            raise ConfigError("this belongs into or behind the loop over the training loader, which has not begun")
        return self._parts.loop

    def _prepare(self, thing: Any) -> Any:
        parts = self._parts
        match thing:
            case nn.Module():
                parts.model = only("model", parts.model, thing.to(self.device))
                return thing
            case torch.optim.Optimizer():
                parts.optimizer = only("optimizer", parts.optimizer, thing)
                return thing
            case LRScheduler():
                parts.schedulers.append(thing)
                return Scheduler(thing, self._may_step)
            case torch.utils.data.DataLoader() if parts.loader is None:
                inner = job_loader(thing, self.gradient_accumulation_steps)
                parts.loader = TrainingLoader(thing, inner, self._epoch)
                return parts.loader
            case torch.utils.data.DataLoader():
                return EvaluationLoader(thing, self._evaluating, self._on_device)
        return thing

    def _on_device(self, batch: Any) -> Any:
        return accelerate.utils.send_to_device(batch, self.device)

    def _epoch(self) -> Iterator[Any]:
        """Yield the batches of an epoch. The first one prepares the job."""
        loop = self._parts.loop or self._begin()
        set_rank(self.job.rank)
        return map(self._on_device, loop.epoch())

    def _begin(self) -> ScriptLoop:
        parts = self._parts
        if parts.model is None or parts.optimizer is None or parts.loader is None:
            raise ConfigError("accelerator.prepare(…) has to be given a model, its optimizer and the training loader")
        settle_config(parts.model)
        forward = RememberedForward(parts.model, self._in_precision)
        parts.model.forward = forward
        loader, made = parts.loader.inner, parts.behind
        loader.go_on_behind(behind := begin_behind(self.job, made))
        self._trackers.begin(self.job, behind)
        self.job.prepare(parts.model, parts.optimizer, loader, max_grad_norm=self._max_grad_norm)
        loop = parts.loop = ScriptLoop(self.job, forward, loader, behind, made)
        parts.optimizer.__dict__["step"] = step = lambda *_, **__: loop.optimizer_step()
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers know it by this mark
        loop.on_commit = self._committed
        self.job.register("epochs of the accelerator", loop.epochs)
        if self.job.is_main:
            say_shares(loader.micro_batches, self.job.world_size, "Accelerator(gradient_accumulation_steps=…)")
        atexit.register(loop.close)
        return loop

    def _in_precision(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self.mixed_precision == "no":
            return forward

        def compute(*args: Any, **kwargs: Any) -> Any:
            with self.autocast():
                return forward(*args, **kwargs)

        return accelerate.utils.convert_outputs_to_fp32(compute)  # type: ignore[no-any-return]

    def _may_step(self) -> bool:
        """Return True if a scheduler moves where the script steps it."""
        loop = self._parts.loop
        if loop is None or loop.is_playing_past:
            return loop is None
        if loop.is_between:
            return not (self._with_optimizer and self.optimizer_step_was_skipped)
        if loop.is_sync or not self._with_optimizer:
            raise ConfigError("scheduler.step() comes behind optimizer.step(), or between two epochs")
        return False

    @contextmanager
    def _evaluating(self, loader: ReadAhead) -> Iterator[Iterable[Any]]:
        """Yield the batches of an evaluation, whose forwards are shared, or one if its result is not used."""
        loop, model = self._parts.loop, self._parts.model
        shared = SharedForwards(self.job, model, [loader], lambda: loop is not None and loop.is_shareable)
        with self.job.phase("evaluation", LONG_WORK_TIMEOUT_S), shared.entered():
            yield islice(loader, 1) if self.is_playing_past else loader

    def _committed(self, step: Step) -> None:
        set_rank(self.job.rank)
        self._fill_norms(step)
        self._trackers.committed(self.job)

    def _fill_norms(self, step: Step) -> None:
        for norm in self._parts.norms:
            norm.fill_(step.grad_norm)
        self._parts.norms.clear()

    def _write_state(self, folder: Path, steps: int, safe_serialization: bool) -> None:
        parts, states = self._parts, accelerate.checkpointing
        folder.mkdir(parents=True, exist_ok=True)
        state = [self.get_state_dict(parts.model)]  # type: ignore[arg-type]  # it was prepared
        kinds: tuple[list[Any], ...] = ([parts.optimizer], parts.schedulers, [])
        states.save_accelerator_state(folder, state, *kinds, 0, steps, safe_serialization=safe_serialization)
        for index, thing in enumerate(self._parts.registered):
            states.save_custom_state(thing, folder, index)
        (folder / _POSITION).write_text(json.dumps({"steps": steps}))
