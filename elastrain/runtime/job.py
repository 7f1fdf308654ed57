"""The user's side: `init`, `Job.prepare`, `Job.steps`.

The same script runs in every worker of `elastrain run`, and alone under `python` as a job of one.
"""

from __future__ import annotations

import random
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from elastrain import agent_messages as am
from elastrain import protocol as p
from elastrain.checks import is_due, neighbour, probes
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.mesh import Mesh
from elastrain.comm.wire.values import MeshConfig
from elastrain.errors import (
    ConfigError,
    CorruptedError,
    DivergedError,
    DriveFailedError,
    ElastrainError,
    NoRoomError,
    RefusedError,
    StateLostError,
    StoppedError,
)
from elastrain.lifecycle import Lifecycle
from elastrain.offload.errors import SpillWriteError
from elastrain.plan import plan
from elastrain.runtime.channel import ChannelClosedError, connect
from elastrain.runtime.describe import describe
from elastrain.runtime.engine import Engine
from elastrain.runtime.environment import Environment, read_environment
from elastrain.runtime.executor import Executor
from elastrain.runtime.facade import Facade
from elastrain.runtime.faults import Faults
from elastrain.runtime.journal import Journal
from elastrain.runtime.layers import Layers
from elastrain.runtime.loader import DataLoader
from elastrain.runtime.loopstate import LoopState, Taken
from elastrain.runtime.memory_keeper import MemoryKeeper, MemoryLimit
from elastrain.runtime.model import ModelState
from elastrain.runtime.optimizer import PieceOptimizer
from elastrain.runtime.randomness import BEFORE, BlockRandomness
from elastrain.runtime.registered import stateful
from elastrain.runtime.settings import Settings
from elastrain.runtime.step import Parts, Step, compute_device, warm_up
from elastrain.runtime.untouched import Untouched
from elastrain.scaling import LossScale, rule_of

_LAST_WORDS = (RefusedError, StoppedError, CorruptedError, DriveFailedError, SpillWriteError)
"""What ends a member without being the script's fault."""
_ENDS_THE_JOB: dict[type[BaseException], type[am.NoRoom | am.LostState | am.Diverged]] = {
    NoRoomError: am.NoRoom,
    StateLostError: am.LostState,
    DivergedError: am.Diverged,
}
"""What no replacement could do better: the launcher ends the job with the sentence, and shows it on every screen."""

_SIGNATURE_CHARS_MAX, _TRACEBACK_CHARS_MAX = 1 << 12, 1 << 16
"""An exception may hold a whole tensor as text; what the launcher is told goes into one line of limited length."""

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

    Raises ConfigError on bad values; ConnectionError if the launcher that started this process does not answer, and
    RefusedError if that one has another secret.
    """
    environment = read_environment()
    room = MemoryLimit.of(
        memory_limit or environment.memory_limit_bytes, tuple(offload_dirs) or environment.offload_dirs
    )
    settings = Settings(
        seed=seed,
        run_length=run_length,
        backups=backups,
        loss_scale=rule_of(loss_scale),
        deterministic=deterministic,
        cross_check_every=cross_check_every,
    )
    return Job(environment, settings, room=room)


class Job:
    """This process's part in the job. Made by `init`."""

    def __init__(self, environment: Environment, settings: Settings, *, room: MemoryLimit | None) -> None:
        self._environment = environment
        self._settings = settings
        self._journal = Journal(environment.run_dir, environment.member)
        self._room_config = room
        self._room: MemoryKeeper | None = None
        self._beacon = Beacon()
        self._channel = connect(environment)
        self._faults = Faults(self._journal, self._kill_node)
        self._registered: dict[str, Any] = {}
        self._parts: Parts | None = None
        self._optimizer: PieceOptimizer | None = None
        self._facade: Facade | None = None
        self._model: nn.Module = nn.Identity()
        self._step: Step | None = None
        self._failed = False
        self._reported: BaseException | None = None
        self._mesh: Mesh | None = None
        self._previous_hook = sys.excepthook
        sys.excepthook = self._on_uncaught
        _seed_generators(settings.seed)
        self._journal.write("init")

    # ----------------------------------------------------------------------------------------------------- for scripts

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
        the global norm; `blocks` names the submodules that are reduced as one (default: the model's direct children,
        containers expanded); `elementwise=True` vouches for an optimizer class that is not torch's own.

        Raises ConfigError, in one sentence, for what cannot be prepared.
        """
        if self._parts is not None:
            raise ConfigError("prepare() was called before: a job has one model")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm must be positive; got {max_grad_norm}")
        loader.bind(self._settings.seed)
        layout = describe(model, optimizer, blocks)
        self._settings.check(layout)
        environment = self._environment
        self._mesh = mesh = Mesh(
            me=environment.member,
            node=environment.node,
            job=environment.job,
            secret=environment.secret,
            beacon=self._beacon,
            config=_mesh_config(environment),
        )
        pieces = PieceOptimizer(optimizer, layout, elementwise=elementwise)
        state = ModelState(model, layout, mesh.empty)
        shape = self._settings.shape(layout, loader.micro_batches)
        executor = Executor(
            layout=layout,
            runs=shape.runs,
            model=state,
            optimizer=pieces,
            allocate=mesh.empty,
            max_grad_norm=max_grad_norm,
        )
        if self._room_config is not None:
            self._room = MemoryKeeper(
                self._room_config, me=environment.member, executor=executor, mesh=mesh, journal=self._journal
            )
        engine = Engine(
            me=environment.member,
            mesh=mesh,
            beacon=self._beacon,
            core=Lifecycle(me=environment.member, shape=shape),
            executor=executor,
            channel=self._channel,
            journal=self._journal,
            faults=self._faults,
            room=self._room,
            report=self._report,
        )
        self._optimizer, self._facade, self._model = pieces, Facade(optimizer), model
        executor.warm_up()
        self._parts = Parts(
            engine=engine,
            model=state,
            loader=loader,
            randomness=BlockRandomness(model, layout.blocks, self._settings.seed, compute_device(model)),
            layers=Layers(model),
            untouched=Untouched(model, state.memory, [spec.name for spec in layout.parameters if not spec.trained]),
            run_length=self._settings.run_length,
            reach=self._faults.reach,
            log=self._journal.write,
            computing=nullcontext if self._room is None else self._room.computing,
            backward=nullcontext if self._room is None else self._room.named_errors,
        )
        self._describe = partial(
            self._settings.describe, layout, loader, optimizer, max_grad_norm, compute_device(model)
        )
        return model, optimizer, loader

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

    def steps(self, loader: DataLoader, *, until: int) -> Iterator[Step]:
        """The steps of the job, up to `until` (exclusive). A member that joined late begins where the others are."""
        parts, _ = self._prepared()
        if loader is not parts.loader:
            raise ConfigError("steps() takes the loader that prepare() returned")
        assert self._facade is not None
        parts.layers.settle()
        loop = LoopState(self._facade.optimizer, self._registered, self._model, parts.layers)
        # Whatever takes time comes before this member says that it is ready: others wait for it from then on.
        loader.start(0, self._expected_micro_batches, self._loader_died)
        warm_up(compute_device(self._model))
        parts.engine.start({**self._describe(), "layers' switches and numbers": parts.layers.digest()})
        threads = torch.get_num_threads()
        entered = parts.engine.enter()
        if isinstance(entered, p.Leave):
            raise StoppedError("the job ended before this worker had joined: there is nothing left to do")
        if entered.state is not None:
            loop.load(entered.state, entered.payload or ())
        parts.model.statistics.refresh()
        parts.untouched.begin()
        number = entered.step
        while True:
            parts.untouched.check_settled()
            self._facade.check()
            taken = self._take(loop)
            parts.randomness.begin(number, BEFORE)
            if number >= until:
                self._enter(number, taken)
                break
            self._settings.check_threads(threads)
            self._step = Step(number, parts, taken, partial(self._enter, number, taken))
            try:
                yield self._step
            except GeneratorExit:
                self._left_early(self._step, loop)
                raise
            if self._step.is_overruled:
                self._end(number)
                return
            if not self._step.is_committed:
                raise ConfigError(
                    f"step {number} was left before it was committed: iterate over it to its end, `for batch in step`"
                )
            number += 1
        parts.engine.finish(number)
        self._end(number)

    def _take(self, loop: LoopState) -> Taken:
        """What a newcomer needs to know that begins with the next step; before the body of the loop changes it."""
        parts, pieces = self._prepared()
        parts.layers.note()
        return loop.take(pieces.hyperparameters())

    def _enter(self, number: int, taken: Taken) -> None:
        """The body of the loop comes to its micro-batches: what it has set before counts in this step."""
        parts, pieces = self._prepared()
        parts.untouched.check_settled()
        parts.layers.note()
        hyper = pieces.hyperparameters()
        parts.engine.begin(number, hyper, taken.settings(number, hyper, parts.layers), taken.text, taken.payload)

    def _left_early(self, step: Step, loop: LoopState) -> None:
        """The loop was left by `break`: fine when most members do so after the same step."""
        if step.is_overruled:
            self._end(step.number)
            return
        if self._failed or not step.is_committed:
            return
        try:
            self._enter(step.number + 1, self._take(loop))  # else a newcomer that others wait for could never begin
            self._prepared()[0].engine.finish(step.number + 1)
        except ElastrainError as error:  # not raised: the script's own exception may be on its way out of the loop
            if self._channel is None and not isinstance(error, _LAST_WORDS):
                sys.stderr.write(f"elastrain: {error}\n")
            self._report(error)
            self._go()
        else:
            self._end(step.number + 1)

    @property
    def rank(self) -> int:
        """Position of this member in the present view; 0 before the job begins."""
        view = self._parts.engine.view if self._parts else None
        return view.rank(self._environment.member) if view and self._environment.member in view else 0

    @property
    def world_size(self) -> int:
        """Members of the present view."""
        view = self._parts.engine.view if self._parts else None
        return len(view.members) if view else 1

    def digest(self) -> str:
        """Digest of the model's parameters: equal on every member, and equal to the undisturbed job's."""
        return self._prepared()[0].model.parameters_digest()

    # ---------------------------------------------------------------------------------------------------------- inside

    def _prepared(self) -> tuple[Parts, PieceOptimizer]:
        if self._parts is None or self._optimizer is None:
            raise ConfigError("call job.prepare(model, optimizer, loader) first")
        return self._parts, self._optimizer

    def _expected_micro_batches(self, step: int) -> Sequence[int]:
        """What this member would compute in a step that nothing disturbs: what is worth loading ahead."""
        parts = self._prepared()[0]
        view, me = parts.engine.view, self._environment.member
        if view is None or me not in view:
            return ()
        length, total = self._settings.run_length, parts.loader.micro_batches
        runs = plan(view.ids, -(-total // length))
        mine = [m for run in runs[me] for m in range(run * length, min(total, (run + 1) * length))]
        if is_due(step, self._settings.cross_check_every):
            firsts = probes(runs)
            owner = neighbour(me, view.ids, firsts)
            mine += [] if owner is None else [firsts[owner] * length]
        return mine

    def _loader_died(self, sentence: str) -> None:
        self._journal.write("loader_died", reason=sentence)
        sys.stderr.write(f"elastrain: {self._environment.member}: {sentence}\n")
        sys.stderr.flush()

    def _end(self, step: int) -> None:
        """The loop is over: say so, let the engine go; the rest of the script is the user's."""
        parts = self._prepared()[0]
        self._step = None
        digest = self.digest()
        self._journal.write("finished", step=step, digest=digest)
        if self._channel is not None:
            try:
                self._channel.send(am.Finished(step=step, digest=digest))
            except ChannelClosedError:
                pass  # the launcher has gone before us: nothing depends on it any more
        parts.engine.close()
        if self._room is not None:
            self._room.close()
        parts.loader.close()
        sys.excepthook = self._previous_hook

    def _kill_node(self) -> None:
        """The launcher has told this worker to, by a fault on request."""
        if self._channel is not None:
            self._channel.send(am.Struck())

    def _on_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The script ends with an exception: tell the launcher where it was, then show it as Python does."""
        if not issubclass(kind, KeyboardInterrupt):
            self._report(error)
        told_by_launcher = type(error) in _ENDS_THE_JOB and self._channel is not None
        if not told_by_launcher and not isinstance(error, _LAST_WORDS):
            self._previous_hook(kind, error, trace)
        self._go()

    def _go(self) -> None:
        """Leave before the job's end: nobody has to wait for the interpreter's, which takes torch most of a second."""
        self._failed = True
        if self._parts is not None:
            self._parts.engine.close()
        self._beacon.close()

    def _report(self, error: BaseException) -> None:
        """Say once what ends this member: to the launcher, or, where it is no fault of the script, as a last word."""
        if error is self._reported:
            return
        self._reported = error
        if isinstance(error, _LAST_WORDS):
            sys.stderr.write(f"elastrain: {error}\n")
            sys.stderr.flush()
            return
        if self._channel is None:
            return
        with suppress(ChannelClosedError):  # nobody is left to be told
            if type(error) in _ENDS_THE_JOB:
                self._channel.send(_ENDS_THE_JOB[type(error)](sentence=str(error)))
                return
            signature = f"{type(error).__name__}: {error}"
            whole = "".join(traceback.format_exception(error))
            self._channel.send(
                am.Failed(
                    step=self._step.number if self._step else 0,
                    micro_batch=self._step.micro_batch if self._step else None,
                    signature=signature[:_SIGNATURE_CHARS_MAX],
                    traceback=f"{signature}\n" if isinstance(error, ElastrainError) else whole[-_TRACEBACK_CHARS_MAX:],
                )
            )


def _mesh_config(environment: Environment) -> MeshConfig:
    """No huge pages: a worker holds what its state and messages need, and its memory limit counts every byte.

    What comes from newer views is kept by the protocol: whoever does not hear that another has gone on waits for it.
    """
    if environment.host:
        return MeshConfig(transport="tcp", bind_host=environment.host, huge_pages=False, holds_newer=False)
    return MeshConfig(huge_pages=False, holds_newer=False)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)
