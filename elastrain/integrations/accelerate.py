"""An `Accelerator` for scripts of accelerate: `from elastrain.integrations.accelerate import Accelerator`.

The job is one process to the script. A batch of the training loader is a micro-batch, and a step has
`gradient_accumulation_steps` of them, which the members share out. So no number depends on how many members there are.
"""

from __future__ import annotations

import atexit
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

import elastrain
from elastrain.errors import ConfigError
from elastrain.integrations.adapter import claim, require
from elastrain.integrations.prepared import EvaluationLoader, Scheduler, TrainingLoader, job_loader
from elastrain.integrations.process_state import (
    ACCELERATE_MINIMUM,
    LONG_WORK_TIMEOUT_S,
    know_elastrain,
    say_shares,
    set_rank,
    settle_config,
)
from elastrain.integrations.script_loop import RememberedForward, ScriptLoop
from elastrain.runtime.job import Job
from elastrain.runtime.loop.step import Step

accelerate: Any = require("accelerate", ACCELERATE_MINIMUM)
know_elastrain()

_TAKEN = frozenset({"device_placement", "split_batches", "rng_types", "dataloader_config", "project_config"})
"""Arguments that are taken, and of which nothing follows beside the number of processes, which is 1."""
_PRECISIONS = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_POSITION = "elastrain.json"
_NONE: Any = None


class Accelerator:
    """The part of a script that `accelerate.Accelerator` is, over the steps of a job.

    Every member runs the body of the training loop for each batch of a step, computes its share of the batches, and
    evaluates alike. Files and logs are written by the main member, or by a successor if it is lost.

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
        self.gradient_accumulation_steps = _steps_of(gradient_accumulation_steps, others)
        _check(others, self.mixed_precision)
        self._loggers = _wanted(log_with)
        fp16 = self.mixed_precision == "fp16"
        self.job = job or elastrain.init(loss_scale="dynamic" if fp16 else None)
        with_project = others.get("project_config")
        self.project_dir = project_dir or getattr(with_project, "project_dir", None)
        self.state = accelerate.PartialState(cpu=cpu)
        set_rank(self.job.rank)
        has_cuda = torch.cuda.is_available() and not cpu
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_cuda else torch.device("cpu")
        self._with_optimizer, self._max_grad_norm = step_scheduler_with_optimizer, max_grad_norm
        self._parts = Parts()
        self._behind = 0
        self._registered: list[Any] = []
        self._held: list[Mapping[str, Any]] = []
        self._norms: list[Tensor] = []

    # ---- The place of this member. The job is one process to the script. ----

    num_processes = 1
    process_index = local_process_index = 0
    use_distributed = False
    distributed_type = accelerate.DistributedType.NO
    is_last_process = True

    @property
    def is_main_process(self) -> bool:
        """True on the member that writes and prints."""
        return self.job.is_main and not self._is_playing_past

    is_local_main_process = is_main_process

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main member."""
        if self.is_main_process:
            sys.stdout.write(kwargs.get("sep", " ").join(map(str, args)) + kwargs.get("end", "\n"))
            sys.stdout.flush()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main member run the code inside first; see `Job.main_first`."""
        return nullcontext() if self._is_playing_past else self.job.main_first(LONG_WORK_TIMEOUT_S)

    local_main_process_first = main_process_first

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does something on the main member only."""
        return lambda *args, **kwargs: function(*args, **kwargs) if self.is_main_process else None

    on_local_main_process = on_main_process

    def wait_for_everyone(self) -> None:
        """Do nothing: members wait for each other in every step."""

    def gather(self, tensor: Any) -> Any:
        """Return what is given: every member evaluates everything."""
        return tensor

    gather_for_metrics = pad_across_processes = gather

    def reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        """Return what is given: the job is one process to the script."""
        return tensor

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
        kind = _PRECISIONS[self.mixed_precision]
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
        self._norms.append(norm)
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
        self._behind += num_batches // per_step - self._behind % per_epoch
        return dataloader

    # ---- Files ----

    def save(self, thing: Any, path: Any, *_: Any, **__: Any) -> None:
        """Save a thing on the main member."""
        if self.is_main_process:
            torch.save(thing, path)

    def register_for_checkpointing(self, *things: Any) -> None:
        """Put things into the states that are saved, and send them to members that join later."""
        for thing in things:
            self.job.register(f"object {len(self._registered)} of register_for_checkpointing", thing)
            self._registered.append(thing)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **_: Any) -> None:
        """Save the whole state as accelerate does, on the main member, while the others wait.

        If the main member is lost meanwhile, its successor saves. Raises ConfigError in the middle of a step.
        """
        if self._is_playing_past:
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
        parts, folder = self._parts, Path(input_dir)
        states = accelerate.checkpointing
        states.load_accelerator_state(folder, [parts.model], [parts.optimizer], parts.schedulers, [], 0)
        for index, thing in enumerate(self._registered):
            states.load_custom_state(thing, folder, index)
        if (position := folder / _POSITION).exists():
            self._behind = json.loads(position.read_text())["steps"]

    # ---- Trackers ----

    def init_trackers(self, project_name: str, config: Any = None, init_kwargs: Mapping[str, Any] = {}) -> None:
        """Name the job's loggers. The lines of a step are written once, whichever member is lost."""
        folder = Path(self.project_dir or ".")
        made: dict[str, Callable[[], Any]] = {
            "tensorboard": lambda: elastrain.TensorBoard(folder / project_name),
            "wandb": lambda: elastrain.Wandb(
                project_name, dir=folder, **{"config": config, **init_kwargs.get("wandb", {})}
            ),
        }
        self._loggers = [made[each]() if isinstance(each, str) else each for each in self._loggers]
        self.job.loggers(*self._loggers)

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Log values of the step that was committed last. Its number is the job's, whatever `step` says."""
        if self._is_playing_past or not self._loggers:
            return
        loop = self._loop()
        if loop.is_between:
            self.job.log(values)
        elif loop.is_sync:
            self._held.append(dict(values))
        else:
            raise ConfigError(
                "accelerator.log(…) in the middle of a step: log where accelerator.sync_gradients is True"
            )

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

    @property
    def _is_playing_past(self) -> bool:
        return self._parts.loop is not None and self._parts.loop.is_playing_past

    def _loop(self) -> ScriptLoop:
        if self._parts.loop is None:
            raise ConfigError("this belongs into or behind the loop over the training loader, which has not begun")
        return self._parts.loop

    def _prepare(self, thing: Any) -> Any:
        parts = self._parts
        match thing:
            case nn.Module():
                parts.model = _only("model", parts.model, thing.to(self.device))
                return thing
            case torch.optim.Optimizer():
                parts.optimizer = _only("optimizer", parts.optimizer, thing)
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
        loader = parts.loader.inner
        loader.go_on_behind(self._behind)
        self.job.prepare(parts.model, parts.optimizer, loader, max_grad_norm=self._max_grad_norm)
        loop = parts.loop = ScriptLoop(self.job, forward, loader, self._behind)
        step = lambda *_, **__: loop.optimizer_step()  # noqa: E731 - with a mark by which schedulers know it
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        parts.optimizer.__dict__["step"] = step
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
    def _evaluating(self) -> Iterator[bool]:
        """Declare an evaluation, and tell whether it may be cut short, because its result is not used."""
        with self.job.phase("evaluation", LONG_WORK_TIMEOUT_S):
            yield self._is_playing_past

    def _committed(self, step: Step) -> None:
        set_rank(self.job.rank)
        self._fill_norms(step)
        held, self._held = self._held, []
        for values in held:
            self.job.log(values)

    def _fill_norms(self, step: Step) -> None:
        for norm in self._norms:
            norm.fill_(step.grad_norm)
        self._norms.clear()

    def _write_state(self, folder: Path, steps: int, safe_serialization: bool) -> None:
        parts, states = self._parts, accelerate.checkpointing
        folder.mkdir(parents=True, exist_ok=True)
        state = [self.get_state_dict(parts.model)]  # type: ignore[arg-type]  # it was prepared
        kinds: tuple[list[Any], ...] = ([parts.optimizer], parts.schedulers, [])
        states.save_accelerator_state(folder, state, *kinds, 0, steps, safe_serialization=safe_serialization)
        for index, thing in enumerate(self._registered):
            states.save_custom_state(thing, folder, index)
        (folder / _POSITION).write_text(json.dumps({"steps": steps}))


class Parts:
    """What a script has prepared."""

    def __init__(self) -> None:
        self.model: nn.Module | None = None
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedulers: list[LRScheduler] = []
        self.loader: TrainingLoader | None = None
        self.loop: ScriptLoop | None = None


def _only(what: str, first: Any, thing: Any) -> Any:
    if first not in (None, thing):
        raise ConfigError(f"accelerator.prepare(…) was given a second {what}: a job has one model and one optimizer")
    return thing


def _steps_of(steps: int, others: dict[str, Any]) -> int:
    plugin = others.pop("gradient_accumulation_plugin", None)
    return steps if plugin is None else int(plugin.num_steps)


def _check(others: Mapping[str, Any], precision: str) -> None:
    """Raise ConfigError for arguments that have no meaning in a job."""
    for name, value in others.items():
        harmless = name == "kwargs_handlers" and all(_is_harmless(each) for each in value or ())
        if name not in _TAKEN and value is not None and not harmless:
            raise ConfigError(f"Accelerator({name}=…) has no meaning in a job of elastrain: leave it out")
    if precision not in _PRECISIONS:
        raise ConfigError(f"mixed_precision is one of {', '.join(_PRECISIONS)}; got {precision!r}")


def _is_harmless(handler: Any) -> bool:
    return type(handler).__name__ in ("DistributedDataParallelKwargs", "InitProcessGroupKwargs", "ProfileKwargs")


def _wanted(log_with: Any) -> Sequence[Any]:
    """Return what `log_with` names. Raises ConfigError for trackers that the job has no logger for."""
    found: list[Any] = []
    for each in log_with if isinstance(log_with, list | tuple) else [log_with] if log_with is not None else []:
        name = getattr(each, "value", each)
        if name == "all":
            found += [kind for kind in ("tensorboard", "wandb") if require_one(kind)]
        elif isinstance(name, str) and name not in ("tensorboard", "wandb"):
            raise ConfigError(
                f"log_with={name!r} cannot go on when the member that writes is lost: choose tensorboard, wandb, or a "
                "logger with the methods of elastrain.Jsonl"
            )
        else:
            found.append(name)
    return found


def require_one(package: str) -> bool:
    """Return True if the package is installed."""
    try:
        return bool(require(package, "0"))
    except ConfigError:
        return False
