"""The user's API: `init`, `Job.prepare`, `Job.steps`.

The same script runs in every worker of `elastrain run`, and alone under `python` as a job of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from elastrain import protocol as p
from elastrain.base.environment import (
    Environment,
    checkpoint_options,
    claim,
    doctor_wish,
    expected_place,
    host_memory,
    resume,
    told_devices,
)
from elastrain.base.environment import stages as told_stages
from elastrain.base.processes import open_missing
from elastrain.device import device_of
from elastrain.errors import ConfigError
from elastrain.job.scaling import LossScale, rule_of
from elastrain.job.world import View
from elastrain.pipeline.stubs.naming import uncompiled
from elastrain.runtime.assembly import Chosen, Prepared, Request, assemble, seed_generators
from elastrain.runtime.bits.doctor_answers import Answer, answer_of
from elastrain.runtime.carrying import refused
from elastrain.runtime.evaluation import WHERE, Broadcasting, Evaluating, Evaluator
from elastrain.runtime.io.heartbeat import LoopHeartbeat
from elastrain.runtime.io.member_connections import Connections, open_connections
from elastrain.runtime.io.member_device import MemberDevice
from elastrain.runtime.io.turns import Turns
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.loggers.job_lines import JobLines
from elastrain.runtime.loop.exit_report import ExitReport, wrong_input_shown
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.loop_state import stateful
from elastrain.runtime.memory.process_memory import Directories, MemoryLimit, host_memory_of
from elastrain.runtime.model import compiler_choices
from elastrain.runtime.model.kernels import compute_device
from elastrain.runtime.model.partition import check_given, describe
from elastrain.runtime.ranks import Ranked, check_group, check_process, joined
from elastrain.runtime.settings import Settings, stages_of
from elastrain.runtime.training_loop import TrainingLoop

_TOO_LATE = (
    "job.checkpoint() comes too late behind the loop over job.steps(…), where the members have let go of the state: "
    "call it in the body of the loop, at the latest in that of the last step or before `break`"
)
_ONE_LOOP = (
    "job.steps(…) was called before, and a job has one loop: let it go up to the last step, and do what comes in "
    "between after a step of it, such as job.evaluate(…), under job.phase(…) where that takes long"
)
_NO_JOB = (
    "elastrain doctor runs a script up to its first micro-batches, as no job: leave out what asks for the "
    "job before its loop"
)
Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def init(
    *,
    seed: int = 0,
    run_length: int = 1,
    backups: int | str = 1,
    loss_scale: LossScale | float | str | None = None,
    deterministic: bool = True,
    cross_check_every: int = 0,
    memory_limit: int | None = None,
    host_memory_limit: int | None = None,
    host_tier: int | None = None,
    offload_dirs: Directories = (),
    stages: int | str | None = None,
) -> Job:
    """Enter the job, and seed Python, NumPy and torch so that every member builds the same model.

    Args:
        seed: Seed of the data order, of the random streams, and of the generators that are seeded now.
        run_length: Micro-batches that are summed in place before they enter the fold. A larger value saves copies of
            gradients, a smaller one balances better. The bits of the result depend on it.
        backups: Verified in-memory copies of each shard's optimizer state on other members; "all": one on every member.
        loss_scale: Scaling of losses, for float16. "dynamic": as torch.amp.GradScaler does by default; a LossScale: the
            same with other values; a number: a fixed scale; None: no scaling. Updates take the scale out again.
        deterministic: False if kernels give other bits at each call. After a fault, a step may then differ by rounding
            from an undisturbed one. Every sample still counts once, and all members agree to the bit.
        cross_check_every: Period in steps of the cross-checks; 0: in step 0 only. In these steps each member also
            computes one micro-batch of a neighbour. The loop sees it, but its gradients are not added. A difference
            ends the job, or is a warning if not `deterministic`. A newcomer is checked in its first step.
        memory_limit: Bytes that this member may hold, on its device if it has one. Default: `--memory-limit`. No bit
            changes.
        host_memory_limit: Bytes of host memory that this member may hold in a job on a device, `host_tier` included.
            Default: `--host-memory-limit`.
        host_tier: Bytes of host memory for what leaves the device, before it goes to `offload_dirs`. Default:
            `--host-tier`.
        offload_dirs: Directory on an SSD, or several (default: `--offload-dir`), for what exceeds a limit. It takes
            activations first, then optimizer shards.
        stages: Members of a pipeline, each with some blocks of the model; "auto": the fewest that have room in memory.
            Default: `--stages`, else 1. No bit changes.

    Raises:
        ConfigError: A value is bad, or this worker has entered a job before.
        ConnectionError: The launcher that started this process does not answer.
        RefusedError: The launcher has another secret.
    """
    with wrong_input_shown():
        environment = joined()
        limit = _limit(environment, memory_limit, (host_memory_limit, host_tier), offload_dirs)
        settings = Settings(
            seed=seed,
            run_length=run_length,
            backups=backups,
            loss_scale=rule_of(loss_scale),
            deterministic=deterministic,
            cross_check_every=cross_check_every,
            stages=stages_of(stages, told_stages()),
        )
        written, resumed = checkpoint_options(), resume()
        check_process(environment, has_entered=Job.has_entered)
    open_missing()
    chosen = Chosen(
        environment=environment,
        settings=settings,
        limit=limit,
        checkpoints=written,
        resume=resumed,
        place=expected_place(),
    )
    job = Job(chosen)
    job.open()
    return job


def _limit(
    environment: Environment, limit_bytes: int | None, host: tuple[int | None, int | None], directories: Directories
) -> MemoryLimit | None:
    """Return the limits of the script, and of the launcher where the script has none. Raises ConfigError."""
    return MemoryLimit.of(
        environment.memory_limit_bytes if limit_bytes is None else limit_bytes,
        directories or environment.offload_dirs,
        host_memory_of(*host, host_memory()),
    )


class Job(Ranked, Evaluating):
    """The part of this process in a job. `init` makes it; its construction does nothing, and `open` connects."""

    has_entered: ClassVar[bool] = False
    """True once this process has entered a job. A worker does that once."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._registered: dict[str, Any] = {}
        self._device = MemberDevice(*told_devices(), deterministic=chosen.settings.deterministic)
        self._open: tuple[Connections, ExitReport] | None = None
        self._prepared: Prepared | None = None
        self._loop: TrainingLoop | None = None
        self._statement: Answer | None = None
        """The answer that is made instead of a job under `elastrain doctor`, else None."""
        self._lines = lines = JobLines(chosen.environment.job, chosen.environment.member)
        alike = Broadcasting(self._evaluator)
        self.loggers, self.log, self.broadcast, self.predict = lines.loggers, lines.log, alike.broadcast, alike.predict

    def open(self) -> None:
        """Connect to the launcher, seed the generators, and report uncaught exceptions from now on.

        Raises ConnectionError and RefusedError as `init` does.
        """
        connections = open_connections(self._chosen.environment)
        Job.has_entered = True
        if connections.agent.is_there:
            claim()
        last_words = ExitReport(connections.agent, self._leave, self._device)
        self._open = connections, last_words
        last_words.take_hook()
        compiler_choices.settle(deterministic=self._chosen.settings.deterministic)
        self._device.choose()
        seed_generators(self._chosen.settings.seed)
        connections.journal.write("init")

    def prepare(
        self,
        model: Model,
        optimizer: Optimizer,
        loader: DataLoader | torch.utils.data.DataLoader[Any],
        *,
        max_grad_norm: float | None = None,
        blocks: Sequence[str] | None = None,
        elementwise: bool = False,
    ) -> tuple[Model, Optimizer, DataLoader]:
        """Prepare model, optimizer and loader for the job, and return the same objects.

        Schedulers go on to drive the optimizer's groups, and its class does the sharded update. From now on its `step`
        raises ConfigError, and `zero_grad` does nothing. Between two steps its `state_dict` returns the whole state.

        Args:
            model: Model to train.
            optimizer: Optimizer of its parameters.
            loader: Loader of the global batches. For one of torch, the job's own is returned, as by `from_torch`.
            max_grad_norm: Limit of the global gradient norm, for clipping.
            blocks: Names of the submodules that are the units of the model's partition; `*` stands for one part of a
                name. Default: the model's children; a child that contains a stack of layers is replaced by the layers.
            elementwise: True to vouch that an optimizer class that is not torch's updates each element by itself.

        Raises:
            ConfigError: One of them cannot be prepared; the message is one sentence.
        """
        if self._prepared is not None:
            raise ConfigError("prepare() was called before: a job has one model")
        check_group(self._chosen.environment)
        loader = check_given(model, optimizer, loader, blocks)
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm > 0):
            raise ConfigError(f"max_grad_norm must be a number above 0; got {max_grad_norm!r}")
        loader.bind(self._chosen.settings.seed)
        inner = uncompiled(model)
        layout = describe(inner, optimizer, blocks)
        self._chosen.settings.check(layout)
        request = Request(
            model=inner, optimizer=optimizer, loader=loader, max_grad_norm=max_grad_norm, elementwise=elementwise
        )
        self._chosen = self._chosen.on(port := device_of(compute_device(inner)))
        if (wish := doctor_wish()) is not None:
            self._statement = answer_of(wish, request, layout, self._chosen)
            return model, optimizer, loader
        connections, last_words = self._opened()
        refused.check(port, model)
        self._device.take(inner, connections.agent.say)
        self._prepared = assemble(request, layout, self._chosen, connections, last_words.report)
        return model, optimizer, loader

    def audit(self, every: int | str) -> None:
        """Let a second member compute one run of micro-batches again in every `every`-th step, and compare the bits.

        Call it before `prepare`, with the same script on all members. The seed decides which run it is. If gradients
        differ, the step is computed again before it is committed, and the wrong member is named; after a second time it
        leaves. "all" audits every run of every step, for twice the compute; 0 audits nothing. No bit changes.
        Raises ConfigError on bad values, and after `prepare`.
        """
        if self._prepared is not None:
            raise ConfigError("job.audit(…) comes before job.prepare(…): members compare it when they join")
        self._chosen = replace(self._chosen, settings=replace(self._chosen.settings, audit=every))

    def register(self, name: str, thing: Any) -> None:
        """Send `thing`, bit for bit, to members that join later. Call it before `steps`, on all members alike.

        Change it after `for batch in step`, equally on every member, because members compare it.

        Args:
            name: Unique name of the thing.
            thing: A module that the script updates itself (such as a mean teacher), a tensor, a NumPy array, a dict, a
                list, or an object with `state_dict` and `load_state_dict`.

        Raises ConfigError for other types; `steps` raises it for parts that are not plain data.
        """
        if name in self._registered or name in ("hyperparameters", "layers") or name.startswith("scheduler "):
            raise ConfigError(f"{name!r} is registered already, or a name of the job's own: choose another")
        stateful(name, thing)
        self._registered[name] = thing

    def checkpoint(self) -> None:
        """Request a durable checkpoint of the next committed step, or of the last step if none follows.

        Returns at once; only the end of the loop waits until it is written. One member's call is enough. While another
        checkpoint is being written, the first step behind its end counts, and all calls until then count as one. Raises
        ConfigError without `elastrain run --checkpoint-dir`, and after the loop if the last step is no checkpoint.
        """
        if self._chosen.checkpoints is None:
            raise ConfigError("this job was not told where to write checkpoints: elastrain run --checkpoint-dir DIR")
        prepared = self._ready()
        if not prepared.parts.handover.has_ended:
            prepared.parts.handover.tell(p.CheckpointWanted(last=False))
        elif prepared.checkpoints is None or not prepared.checkpoints.has_newest:
            raise ConfigError(_TOO_LATE)

    def steps(self, loader: DataLoader, *, until: int) -> Iterator[Step]:
        """Iterate over the steps of the job up to `until` (exclusive). Late members start at the open step.

        A job has one such loop. Raises ConfigError for a second loop, another loader, and an `until` that is no number.
        """
        if not hasattr(until, "real"):  # all numbers have it
            raise ConfigError(f"until must be a number of steps; got {until!r}")
        if self._statement is not None:
            yield from self._statement.steps(until)
            return
        prepared, opened, settings = self._ready(), self._opened(), self._chosen.settings
        if loader is not prepared.parts.loader:
            raise ConfigError("steps() takes the loader that prepare() returned")
        if self._loop is not None:
            raise ConfigError(_ONE_LOOP)
        settings.check_registered(prepared.model, self._registered)
        self._loop = loop = TrainingLoop(prepared, settings, *opened, self._registered, self._lines)
        try:
            yield from loop.steps(until)
        finally:
            loop.give_back_model()

    @property
    def member(self) -> str:
        """Id of this member, such as "m0". A worker that replaces another one has an id of its own."""
        return self._chosen.environment.member

    def _turns(self) -> Turns:
        return self._opened()[0].turns

    def _standing(self) -> tuple[View | None, tuple[int, int]]:
        view = self._prepared.engine.view if self._prepared else None
        return view if view and self.member in view else None, self._chosen.place

    def _whereabouts(self) -> LoopHeartbeat:
        return self._opened()[0].whereabouts

    def _evaluator(self, call: str) -> Evaluator:
        self._ready()
        if self._loop is None:
            raise ConfigError(f"{call} was called before the loop: {WHERE}")
        return self._loop.evaluator

    def digest(self) -> str:
        """Return the digest of the model's parameters, which is equal on all members and to an undisturbed job's."""
        return self._ready().parts.model.parameters_digest()

    def _opened(self) -> tuple[Connections, ExitReport]:
        if self._open is None:
            raise ConfigError("this job was never opened: elastrain.init() makes one that is")
        return self._open

    def _ready(self) -> Prepared:
        if self._statement is not None:
            raise ConfigError(_NO_JOB)
        if self._prepared is None:
            raise ConfigError("call job.prepare(model, optimizer, loader) first")
        return self._prepared

    def _leave(self) -> None:
        """Close the engine and the beacon, so that the other members notice at once."""
        if self._prepared is not None:
            self._prepared.engine.close()
        self._opened()[0].beacon.close()
