"""What a resumed job starts from, as this member reads it from the checkpoint: in a thread, beside the engine's.

The parameters of the whole model are put into the model as they come. Nobody reads them before `InitialRead` is told;
and where other members' come before, those are not touched any more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.base.resume import Resume, changed
from elastrain.errors import ConfigError, StateLostError
from elastrain.job.scaling import Scaler
from elastrain.job.values import Initial
from elastrain.runtime.durable import by_name
from elastrain.runtime.durable.node_disks import Reader, places_of
from elastrain.runtime.io.loop_channel import InitialUnread, Told
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import BUFFERS, LOOP, MODEL, Manifest
from elastrain.snapshot.durable.plain import gather, unpack_named
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.shard_state import ShardState

SHOW_EVERY_S = 0.5
"""A terminal's bar moves so often."""


def initial_of(resume: Resume | None) -> Initial:
    """What the protocol has to know of it."""
    if resume is None:
        return Initial()
    scaler = None if resume.scale is None else Scaler(scale=resume.scale, clean_steps=resume.clean_steps)
    return Initial(step=resume.step, is_stored=True, scaler=scaler)


class ReadBytes:
    """What this member has read, and needs; told now and then, by whatever thread reads."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._done_bytes = self._size_bytes = 0
        self._told_s = 0.0

    def begin(self, size_bytes: int) -> None:
        self._done_bytes, self._size_bytes, self._told_s = 0, size_bytes, time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Without a lock: what is lost between two threads only makes a bar shorter."""
        self._done_bytes += size_bytes
        if time.monotonic() >= self._told_s + SHOW_EVERY_S:
            self._told_s = time.monotonic()
            self._tell(min(self._done_bytes, self._size_bytes), self._size_bytes)

    def end(self) -> None:
        self._tell(self._size_bytes, self._size_bytes)


class StoredInitial:
    """`loop` is for the main thread, all else for the engine's. `tell` takes what came of a reading, in any thread."""

    def __init__(
        self,
        resume: Resume,
        model: ModelState,
        optimizer: PieceOptimizer,
        reader: Reader,
        tell: Callable[[Told], None],
        show: Callable[[int, int], None],
    ) -> None:
        self._resume = resume
        self._read_bytes = ReadBytes(show)
        self._optimizer = optimizer
        self._reader = reader
        self._model = model
        self._tell = tell
        self._checkpoint: Checkpoint | None = None
        self._states: dict[int, ShardState] = {}
        self._homes: dict[str, str] = {}
        """The model's names -> the layout's names of the same memory, if the checkpoint has another cutting."""
        self._has_parameters = False
        self._writing = threading.Lock()
        """Held by who writes into the model's memory, or moves it, while a thread reads the checkpoint."""
        self._elsewhere: set[int] = set()
        """Shards whose parameters come from states and other members by now: those of a later step, perhaps."""

    def check(self, model: nn.Module) -> None:
        """Raises ConfigError where names or shapes differ: agents compare hashes of models, which do not say what."""
        if self._resume.spec.get("model") != self._model.layout.digest():
            self._homes = by_name.homes(model, self._model.layout)
            with suppress(CheckpointError):  # whoever reads the checkpoint says what is wrong with it
                self._check_names(self._open().manifest)

    def _check_names(self, manifest: Manifest) -> None:
        found = {self._homes.get(each.name, each.name): each for each in manifest.parameters}
        by_name.check(found, self._model.layout, str(self._resume))
        more = sorted(each.name for each in manifest.parameters if each.name not in self._homes)
        if more and not self._resume.accepts_changes:
            raise ConfigError(f"{self._resume} has {more[0]!r}, and the model does not: it is of another model")

    def carry_out(self, command: p.Command) -> None:
        """Begin to read states of shards, at first with all parameters; `InitialRead` is told at the end."""
        match command:
            case p.ReadInitial():
                name = "elastrain-read-checkpoint"
                threading.Thread(target=self._read, args=(command.shards,), name=name, daemon=True).start()
            case p.EndAttempt():  # what was read for roles that this member has lost meanwhile is needed by nobody
                self._states.clear()

    @contextmanager
    def making_way(self, command: p.Command) -> Iterator[None]:
        """Around the work of a command: what it writes into the model, the reading thread leaves alone from then on."""
        shards = p.overwrites(command)
        with self._writing if shards or isinstance(command, p.HoldBlocks) else nullcontext():
            self._elsewhere.update(shards)
            yield

    def take(self, shard: int) -> ShardState:
        """A state that was read; it is the caller's."""
        return self._states.pop(shard)

    def changed(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        """Names of what this job does otherwise on purpose."""
        return changed(self._resume, spec)

    @property
    def accepts_changes(self) -> bool:
        return self._resume.accepts_changes

    def loop(self) -> tuple[str, list[Tensor]] | None:
        """The training loop's state at the first step; None where the script begins by itself.

        Raises ConfigError or StateLostError, see `_error`.
        """
        try:
            checkpoint = self._open()
            return checkpoint.read_attachment(LOOP) if LOOP in checkpoint.manifest.attachments else None
        except CheckpointError as error:
            raise _error(self._resume, error) from error

    def buffers(self, mine: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return the buffers of the checkpoint, or of an imported state. `mine`: the model's persistent ones.

        Raises ConfigError where one is of another shape, as `loop` otherwise.
        """
        try:
            checkpoint = self._open()
            name = next((name for name in (BUFFERS, MODEL) if name in checkpoint.manifest.attachments), None)
            found = unpack_named(*checkpoint.read_attachment(name)) if name is not None and mine else {}
        except CheckpointError as error:
            raise _error(self._resume, error) from error
        for name, its in mine.items():
            value, is_replaced = found.get(name, its), LOOP in checkpoint.manifest.attachments  # by the loop, perhaps
            if not is_replaced and its is not None and value is not None and its.shape != value.shape:
                which = f"of shape {tuple(its.shape)} in the model and of {tuple(value.shape)} in {self._resume}"
                raise ConfigError(f"buffer {name!r} is {which}: it is of another model")
        return {name: value for name, value in found.items() if name in mine}

    def _open(self) -> Checkpoint:
        if self._checkpoint is None:
            found = Checkpoint.open(places_of(self._resume, self._reader), self._resume.name)
            self._checkpoint = replace(found, on_bytes=self._read_bytes.add)
        return self._checkpoint

    def _read(self, shards: tuple[int, ...]) -> None:
        try:
            self._take_in(shards)
        except CheckpointError as error:
            self._tell(InitialUnread(_error(self._resume, error)))
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the engine raises it
            self._tell(InitialUnread(error))
        else:
            self._tell(p.InitialRead(shards=shards))

    def _take_in(self, shards: tuple[int, ...]) -> None:
        """As they lie there; by the names of parameters where that model was cut otherwise, or never."""
        checkpoint = self._open()
        others = () if self._has_parameters else [s for s in range(len(self._model.layout.shards)) if s not in shards]
        # A model's cutting has one digest. Without it (a spec that says nothing) no shard can be taken as it is.
        if checkpoint.manifest.spec.get("model") == self._model.layout.digest():
            self._read_bytes.begin(checkpoint.size_of(shards, others))
            self._put(checkpoint.read_shards(shards), shards)
            # Of what others hold only the parameters are read: optimizer state is twice as much.
            for shard, parameters in checkpoint.read_parameters(others):
                self._write(shard, parameters)
        else:
            self._read_bytes.begin(checkpoint.manifest.size_bytes)
            self._check_names(checkpoint.manifest)
            plain = by_name.untied(gather(checkpoint), self._homes, str(self._resume))
            cut = (self._model.layout.shards[shard] for shard in (*shards, *others))
            self._put(
                (by_name.shard_state(plain, self._model.layout, shard, self._resume.step) for shard in cut), shards
            )
        self._has_parameters = True
        self._read_bytes.end()

    def _put(self, states: Iterable[ShardState], kept: Container[int]) -> None:
        for state in states:
            # Never twice: the model may be computing by the time that a change of view gives this member more shards.
            if not self._has_parameters:
                self._write(state.shard, state.parameters)
            if state.shard in kept:
                self._states[state.shard] = self._optimizer.take_over(state, self._open().manifest.optimizer)

    def _write(self, shard: int, parameters: Tensor) -> None:
        place = self._model.layout.shards[shard]
        with self._writing:  # a holder of copies may be the last one that lives, and train before all is read
            if shard not in self._elsewhere and self._model.has(place):
                self._model.parameters_of(place).copy_(parameters)


def _error(resume: Resume, error: CheckpointError) -> Exception:
    """What is damaged ends this life: the next one begins with an older checkpoint, if there is a good one."""
    if isinstance(error, DamagedError):
        return StateLostError(f"the checkpoint that this job starts from is damaged: {error}")
    if resume.disks:  # a node was lost, perhaps: those that are left look again at what they have
        return StateLostError(f"the checkpoint that this job starts from cannot be read: {error}")
    return ConfigError(f"{resume} cannot be read: {error}")
