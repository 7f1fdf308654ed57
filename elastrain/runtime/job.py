"""The user's side: `init`, `Job.prepare`, `Job.steps`.

The same script runs in every worker of `elastrain run`, and alone under `python` as a job of one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from elastrain import protocol as p
from elastrain.base.environment import (
    Environment,
    checkpoint_options,
    claim,
    expected_place,
    parent_worker,
    read_environment,
    resume,
    statement_wish,
)
from elastrain.base.environment import stages as told_stages
from elastrain.base.processes import open_missing
from elastrain.errors import ConfigError
from elastrain.job.scaling import LossScale, rule_of
from elastrain.job.world import View
from elastrain.runtime.assembly import (
    Chosen,
    Connections,
    Prepared,
    Request,
    assemble,
    open_connections,
    seed_generators,
)
from elastrain.runtime.io.heartbeat import PHASE_TIMEOUT_S
from elastrain.runtime.loader.loader import DataLoader
from elastrain.runtime.loop.exit_report import ExitReport, wrong_input_shown
from elastrain.runtime.loop.step import Step
from elastrain.runtime.loop_state.loop_state import stateful
from elastrain.runtime.memory.process_memory import MemoryLimit
from elastrain.runtime.memory_answer import MemoryEstimate
from elastrain.runtime.model.kernels import import_compiler_late
from elastrain.runtime.model.partition import check_given, describe
from elastrain.runtime.settings import Settings, stages_of
from elastrain.runtime.training_loop import TrainingLoop

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
    offload_dirs: Sequence[str] = (),
    stages: int | None = None,
) -> Job:
    """Enter the job. Seeds Python, NumPy and torch, so that every member builds the same model.

    seed: of data order and random streams, and of the generators now.
    run_length: micro-batches summed in place before they enter the fold (`c`): more saves gradient copies, less
        balances better. Part of the result's bits.
    backups: verified in-memory copies of every shard's optimizer state on other members; "all" replicates everything.
    loss_scale: for float16. "dynamic" scales every loss as torch.amp.GradScaler does with its defaults, a LossScale
        with other values; a number is a fixed scale; None scales nothing. Gradients are scaled back when applied.
    deterministic: False where kernels give other bits each time. A disturbed step may then differ by rounding from an
        undisturbed one; every sample still counts once, and all members agree to the bit.
    cross_check_every: in step 0, and in every so many steps unless it is 0, each member also computes one micro-batch
        of a neighbour's: the loop sees it like any other, it counts for nothing, and gradients that differ end the job
        with a sentence (or are a warning, not deterministic). So does a newcomer in its first step.
    memory_limit: bytes that this member may hold in memory; without it, what `elastrain run --memory-limit` said. What
        does not fit goes to `offload_dirs` (`--offload-dir`), directories on SSDs: activations first, then optimizer
        shards. No bit changes.
    stages: members of a pipeline, each with some blocks of the model; without it, what `elastrain run --stages` said,
        else 1. No bit changes.

    Raises ConfigError on bad values, and in a worker that has entered before; ConnectionError if the launcher that
    started this process does not answer, and RefusedError if that one has another secret.
    """
    with wrong_input_shown():
        environment = read_environment()
        directories = tuple(offload_dirs) or environment.offload_dirs
        limit = MemoryLimit.of(memory_limit or environment.memory_limit_bytes, directories)
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
        _check_process(environment)
    open_missing()
    job = Job(
        Chosen(
            environment=environment,
            settings=settings,
            limit=limit,
            checkpoints=written,
            resume=resumed,
            place=expected_place(),
        )
    )
    job.open()
    return job


def _check_process(environment: Environment) -> None:
    """Warn in a process that a worker has started. Raises ConfigError where this process can have no job any more."""
    parent = parent_worker()
    if parent is not None and Job.has_entered:
        raise ConfigError(
            f"this process is a fork of {parent}, after elastrain.init(), and cannot have a job of its own: "
            "start it by subprocess, or by multiprocessing's 'spawn'"
        )
    if environment.agent is not None and Job.has_entered:
        raise ConfigError("elastrain.init() was called before: a worker has one job, which init() returned then")
    if parent is not None:
        warnings.warn(f"this process was started by {parent} and is a job of one beside it", stacklevel=3)


class Job:
    """This process's part in the job. Made by `init`; construction does nothing, `open` connects."""

    has_entered: ClassVar[bool] = False
    """Whether this process has entered a job; a worker does that once."""

    def __init__(self, chosen: Chosen) -> None:
        self._chosen = chosen
        self._registered: dict[str, Any] = {}
        self._open: tuple[Connections, ExitReport] | None = None
        self._prepared: Prepared | None = None
        self._has_loop = False
        self._statement: MemoryEstimate | None = None
        """Made in place of a job, where only its memory is asked for."""

    def open(self) -> None:
        """Connect to the launcher, seed the generators, and hear of exceptions that nobody catches.

        Raises ConnectionError, RefusedError.
        """
        connections = open_connections(self._chosen.environment)
        Job.has_entered = True
        if connections.agent.is_there:
            claim()
        last_words = ExitReport(connections.agent, self._leave)
        self._open = connections, last_words
        last_words.take_hook()
        import_compiler_late()
        seed_generators(self._chosen.settings.seed)
        connections.journal.write("init")

    def prepare(
        self,
        model: Model,
        optimizer: Optimizer,
        loader: DataLoader,
        *,
        max_grad_norm: float | None = None,
        blocks: Sequence[str] | None = None,
        elementwise: bool = False,
    ) -> tuple[Model, Optimizer, DataLoader]:
        """Take the three over and join the job; returns the same objects.

        The optimizer keeps its groups and is what schedulers drive; its class does the sharded update. Its `step`,
        `state_dict` and `load_state_dict` are refused from now on; `zero_grad` does nothing. `max_grad_norm` clips by
        the global norm; `blocks` names the submodules that are reduced as one, where `*` stands for one part of a name
        (default: the model's children; every child that has a stack of layers in it is opened, and the layers are
        blocks); `elementwise=True` vouches for an optimizer class that is not torch's own.

        Raises ConfigError, in one sentence, for what cannot be prepared.
        """
        if self._prepared is not None:
            raise ConfigError("prepare() was called before: a job has one model")
        check_given(model, optimizer, loader, blocks)
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and max_grad_norm > 0):
            raise ConfigError(f"max_grad_norm must be a number above 0; got {max_grad_norm!r}")
        loader.bind(self._chosen.settings.seed)
        layout = describe(model, optimizer, blocks)
        self._chosen.settings.check(layout)
        request = Request(
            model=model, optimizer=optimizer, loader=loader, max_grad_norm=max_grad_norm, elementwise=elementwise
        )
        if (wish := statement_wish()) is not None:
            self._state(MemoryEstimate(wish, request, layout, self._chosen))
            return model, optimizer, loader
        connections, last_words = self._opened()
        self._prepared = assemble(request, layout, self._chosen, connections, last_words.report)
        return model, optimizer, loader

    def audit(self, every: int | str) -> None:
        """Have one run of micro-batches of every `every`-th step computed a second time, by another member.

        Call it before `prepare`, with the same script on all. The run is drawn from the seed, and its gradients are
        compared to the bit. Where they differ, the step is computed anew before anything of it is committed, and
        whoever was wrong is named; after the second time it leaves. "all" does so with every run of every step, for
        twice the compute; 0 with none. No bit changes. Raises ConfigError on bad values, and after `prepare`.
        """
        if self._prepared is not None:
            raise ConfigError(
                "job.audit(…) comes before job.prepare(…): members compare what they audit when they join"
            )
        self._chosen = replace(self._chosen, settings=replace(self._chosen.settings, audit=every))

    def register(self, name: str, thing: Any) -> None:
        """Carry `thing` to members that join later, bit for bit: before `steps`, and with the same script on all.

        thing: a module that the script moves itself (a mean teacher), a tensor or NumPy array, a dict or list, or an
        object with `state_dict` and `load_state_dict` of such. Move it after `for batch in step`, alike on every
        member: what members have is compared. Raises ConfigError for other things; `steps` does for parts that are no
        data.
        """
        if name in self._registered or name in ("hyperparameters", "layers") or name.startswith("scheduler "):
            raise ConfigError(f"{name!r} is registered already, or a name of the job's own: choose another")
        stateful(name, thing)
        self._registered[name] = thing

    def checkpoint(self) -> None:
        """Have the next step that is committed become a durable checkpoint, or the last step, if none follows.

        Returns at once, and the training waits for nothing; only the end of the loop waits until the checkpoint is
        written. One member's wish is enough, and all members' count as one. Raises ConfigError where the job was not
        told where to write (`elastrain run --checkpoint-dir`), and behind the loop, where the last step is none.
        """
        if self._chosen.checkpoints is None:
            raise ConfigError("this job was not told where to write checkpoints: elastrain run --checkpoint-dir DIR")
        prepared = self._ready()
        if not prepared.parts.handover.has_ended:
            prepared.parts.handover.tell(p.CheckpointWanted(last=False))
        elif prepared.checkpoints is None or not prepared.checkpoints.has_newest:
            raise ConfigError(
                "job.checkpoint() comes too late behind the loop over job.steps(…), where the members have let go of "
                "the state: call it in the body of the loop, at the latest in that of the last step or before `break`"
            )

    @contextmanager
    def phase(self, name: str, timeout: float = PHASE_TIMEOUT_S) -> Iterator[None]:
        """Say that what happens inside takes longer than a step: an evaluation, a checkpoint, a compilation.

        A member for which others wait is taken to hang when it shows no sign of life for some steps' time; inside, for
        `timeout` seconds. For the thread that runs the training loop, at any place of the script. Waiting for the
        loader, and whatever torch.compile compiles, needs no phase. Raises ConfigError for a timeout that is none.
        """
        connections, _ = self._opened()
        with connections.whereabouts.stretch(name, timeout):
            yield

    def steps(self, loader: DataLoader, *, until: int) -> Iterator[Step]:
        """The steps of the job, up to `until` (exclusive). A member that joined late begins where the others are.

        A job has one such loop. Raises ConfigError for another one, another loader, and an `until` that is no number.
        """
        if not hasattr(until, "real"):  # all numbers have it
            raise ConfigError(f"until must be a number of steps; got {until!r}")
        if self._statement is not None:
            yield from self._statement.steps(until)
            return
        prepared, (connections, last_words) = self._ready(), self._opened()
        if loader is not prepared.parts.loader:
            raise ConfigError("steps() takes the loader that prepare() returned")
        if self._has_loop:
            raise ConfigError(
                "job.steps(…) was called before, and a job has one loop: let it go up to the last step, and do what "
                "comes in between after a step of it, under job.phase(…) where that takes long"
            )
        self._has_loop = True
        loop = TrainingLoop(prepared, self._chosen.settings, connections, last_words, self._registered)
        try:
            yield from loop.steps(until)
        finally:
            loop.give_back_model()

    @property
    def rank(self) -> int:
        """Position of this member in the present view; before its first view, the position that it is expected to have.

        A member that joins a job under way is never 0 before it has joined.
        """
        view, me = self._view, self._chosen.environment.member
        return view.rank(me) if view else self._chosen.place[0]

    @property
    def world_size(self) -> int:
        """Members of the present view; before this member's first view, as many as it is expected to have."""
        view = self._view
        return len(view.members) if view else self._chosen.place[1]

    @property
    def _view(self) -> View | None:
        """The present view, if this member belongs to it."""
        view = self._prepared.engine.view if self._prepared else None
        return view if view and self._chosen.environment.member in view else None

    def digest(self) -> str:
        """Digest of the model's parameters: equal on every member, and equal to the undisturbed job's."""
        return self._ready().parts.model.parameters_digest()

    def _opened(self) -> tuple[Connections, ExitReport]:
        if self._open is None:
            raise ConfigError("this job was never opened: elastrain.init() makes one that is")
        return self._open

    def _state(self, statement: MemoryEstimate) -> None:
        """Answer, as soon as everything is known. Raises SystemExit."""
        if not statement.needs_steps:
            statement.answer()
        self._statement = statement

    def _ready(self) -> Prepared:
        if self._statement is not None:
            raise ConfigError(
                "elastrain doctor runs a script with stages up to its first micro-batch, as no job: leave out what "
                "asks for the job before its loop"
            )
        if self._prepared is None:
            raise ConfigError("call job.prepare(model, optimizer, loader) first")
        return self._prepared

    def _leave(self) -> None:
        """Let the others know at once: the engine says farewell, the beacon ends."""
        if self._prepared is not None:
            self._prepared.engine.close()
        self._opened()[0].beacon.close()
