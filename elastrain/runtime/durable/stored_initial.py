"""The initial state of a resumed job, which this member reads from the checkpoint in a thread beside the engine.

The thread writes parameters into the model as it reads them. The model is not used before the event `InitialRead`.
Shards that the engine overwrites in the meantime are left alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from elastrain import protocol as p
from elastrain.base.resume import LAYERS, Resume, changed, is_taken_over
from elastrain.device.finding import device_of
from elastrain.device.port import DevicePort
from elastrain.errors import ConfigError, StateLostError
from elastrain.job.layout import Shard
from elastrain.job.scaling import Scaler
from elastrain.job.values import Initial
from elastrain.pipeline.stubs.naming import plain_name
from elastrain.runtime.durable import by_name
from elastrain.runtime.durable.node_disks import Reader, places_of
from elastrain.runtime.io.loop_channel import LoopFailed, Told
from elastrain.runtime.model.flat_model import ModelState
from elastrain.runtime.model.optimizer import PieceOptimizer
from elastrain.snapshot.durable.errors import CheckpointError, DamagedError
from elastrain.snapshot.durable.manifest import BUFFERS, LOOP, MODEL, Manifest
from elastrain.snapshot.durable.plain import gather, unpack_named
from elastrain.snapshot.durable.reading import Checkpoint
from elastrain.snapshot.shard_state import ShardState

SHOW_EVERY_S = 0.5
"""Seconds between two reports of progress, for the progress bar."""


def initial_of(resume: Resume | None) -> Initial:
    """Return the description of the initial state for the protocol."""
    if resume is None:
        return Initial()
    scaler = None if resume.scale is None else Scaler(scale=resume.scale, clean_steps=resume.clean_steps)
    return Initial(step=resume.step, is_stored=True, scaler=scaler)


class ReadBytes:
    """Progress of reading. `tell` gets the bytes read and the bytes in total, at intervals, in any reading thread."""

    def __init__(self, tell: Callable[[int, int], None]) -> None:
        self._tell = tell
        self._done_bytes = self._size_bytes = 0
        self._told_s = 0.0

    def begin(self, size_bytes: int) -> None:
        """Start a new count towards `size_bytes`."""
        self._done_bytes, self._size_bytes, self._told_s = 0, size_bytes, time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Count bytes. Takes no lock: a lost update only makes the progress bar shorter."""
        self._done_bytes += size_bytes
        if time.monotonic() >= self._told_s + SHOW_EVERY_S:
            self._told_s = time.monotonic()
            self._tell(min(self._done_bytes, self._size_bytes), self._size_bytes)

    def end(self) -> None:
        """Report that everything is read."""
        self._tell(self._size_bytes, self._size_bytes)


class _Turns:
    """Turns of threads. In a turn, the thread's stream waits for the work of the turns before."""

    def __init__(self, port: DevicePort) -> None:
        self._lock = threading.Lock()
        self._port = port
        self._done = port.record()
        self._overwritten: set[int] = set()

    def overwrite(self, shards: Iterable[int]) -> None:
        """Note shards that the engine overwrites, perhaps with parameters of a later step."""
        self._overwritten.update(shards)

    def is_overwritten(self, shard: int) -> bool:
        """Return True if the engine has overwritten the shard since."""
        return shard in self._overwritten

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._done.wait()
            yield
            self._done = self._port.record()


class StoredInitial:
    """The reader of the initial state.

    The main thread calls `loop`, and the engine thread everything else. `tell` gets the outcome of a read, in any
    thread. In a job on a device, who hears it must wait for the stream of that thread.
    """

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
        """Names in the model -> names in the layout for the same memory. Set if the checkpoint has other shards."""
        self._has_parameters = False
        device = next((tensor.device for tensor in model.memory.values()), torch.device("cpu"))
        self._alone = _Turns(device_of(device))
        """Turns of the threads that write or move the model's memory during a read."""
        self._gives_way = False
        """True if the job begins from what the scripts have loaded."""

    def check(self, model: nn.Module) -> None:
        """Raise ConfigError if names or shapes differ from the checkpoint's. The text names the difference.

        Agents compare only hashes of models.
        """
        if self._resume.spec.get("model") != self._model.layout.digest():
            self._homes = by_name.homes(model, self._model.layout)
            with suppress(CheckpointError):  # a later read reports what is wrong
                self._check_names(self._open().manifest)

    def _check_names(self, manifest: Manifest) -> None:
        found = {self._homes.get(n := plain_name(each.name), n): each for each in manifest.parameters}
        by_name.check(found, self._model.layout, str(self._resume))
        more = sorted(each.name for each in manifest.parameters if plain_name(each.name) not in self._homes)
        if more and not self._resume.accepts_changes:
            raise ConfigError(f"{self._resume} has {more[0]!r}, and the model does not: it is of another model")

    def carry_out(self, command: p.Command) -> None:
        """Start to read shards in a thread, the first time with all parameters. Ends with `InitialRead`."""
        match command:
            case p.ReadInitial() if self._gives_way:
                self._tell(p.InitialRead(shards=command.shards))
            case p.ReadInitial():
                name = "elastrain-read-checkpoint"
                threading.Thread(target=self._read, args=(command.shards,), name=name, daemon=True).start()
            case p.EndAttempt():  # this member may no longer hold the shards that were read
                self._states.clear()

    @contextmanager
    def making_way(self, command: p.Command) -> Iterator[None]:
        """Keep the reading thread away from the model's memory that a command overwrites, during it and later."""
        shards = p.overwrites(command)
        with self._alone() if shards or isinstance(command, p.HoldBlocks) else nullcontext():
            self._alone.overwrite(shards)
            yield

    def take(self, shard: int) -> ShardState:
        """Return a state that was read, and forget it here."""
        if self._gives_way:
            place = self._model.layout.shards[shard]
            master = getattr(torch, place.master_dtype)
            return self._optimizer.create(place, self._model.parameters_of(place).to(master, copy=True))
        return self._states.pop(shard)

    def give_way(self) -> None:
        """Begin from the parameters and the optimizer state that the script has loaded. The checkpoint is not read."""
        self._gives_way = True

    def counts(self, loaded: Callable[[Shard], list[dict[str, Any]]]) -> tuple[int, int] | None:
        """Return the optimizer's numbers of steps in the checkpoint and in a loaded state, of the same parameters.

        Returns None if the loaded state counts no steps. Raises as `loop`.

        Args:
            loaded: Returns the loaded state of the pieces of a shard.
        """
        layout = self._model.layout
        counted = ((shard, _count(loaded(shard))) for shard in layout.shards)
        shard, count = next(((shard, count) for shard, count in counted if count >= 0), (None, -1))
        if shard is None:
            return None
        try:
            checkpoint = self._open()
            if checkpoint.manifest.spec.get("model") == layout.digest():
                state = next(iter(checkpoint.read_shards((shard.index,))))
            else:
                plain = by_name.untied(gather(checkpoint), self._homes, str(self._resume))
                state = by_name.shard_state(plain, layout, shard, self._resume.step)
        except CheckpointError as error:
            raise _error(self._resume, error) from error
        return max(0, _count(state.pieces)), count

    def taken_over(self, *, has_layers: bool) -> dict[str, Any]:
        """Return the settings of optimizer and schedulers with which the checkpoint's job began.

        `has_layers`: those of the layers too, which a library may have set from a checkpoint of its own.
        """
        found = self._resume.spec.items()
        return {name: value for name, value in found if is_taken_over(name) or (has_layers and name == LAYERS)}

    def changed(self, spec: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of settings that this job deliberately changes."""
        return changed(self._resume, spec)

    @property
    def accepts_changes(self) -> bool:
        """True if the user allowed other settings than those of the checkpoint."""
        return self._resume.accepts_changes

    def loop(self) -> tuple[str, list[Tensor]] | None:
        """Return the training loop's state at the first step, or None if the checkpoint has none.

        Raises ConfigError or StateLostError, see `_error`.
        """
        try:
            checkpoint = self._open()
            return checkpoint.read_attachment(LOOP) if LOOP in checkpoint.manifest.attachments else None
        except CheckpointError as error:
            raise _error(self._resume, error) from error

    def buffers(self, mine: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Return the buffers in the checkpoint that are also in `mine`, the persistent buffers of the model.

        Raises ConfigError if shapes differ and the loop's state does not replace the buffer. Else raises as `loop`.
        """
        try:
            checkpoint = self._open()
            name = next((name for name in (BUFFERS, MODEL) if name in checkpoint.manifest.attachments), None)
            found = unpack_named(*checkpoint.read_attachment(name)) if name is not None and mine else {}
        except CheckpointError as error:
            raise _error(self._resume, error) from error
        for name, its in mine.items():
            value, is_replaced = (
                found.get(name, its),
                LOOP in checkpoint.manifest.attachments,
            )  # the loop's state may replace it
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
            self._tell(LoopFailed(_error(self._resume, error)))
        except Exception as error:  # noqa: BLE001 - the edge of a thread: the engine raises it
            self._tell(LoopFailed(error))
        else:
            self._tell(p.InitialRead(shards=shards))

    def _take_in(self, shards: tuple[int, ...]) -> None:
        """Read shards and parameters.

        If the model in the checkpoint has other shards or none, all tensors are read and divided by name.
        """
        checkpoint = self._open()
        others = () if self._has_parameters else [s for s in range(len(self._model.layout.shards)) if s not in shards]
        # Equal digests mean equal shards. A spec without the digest does not tell, so shards are converted.
        if checkpoint.manifest.spec.get("model") == self._model.layout.digest():
            self._read_bytes.begin(checkpoint.size_of(shards, others))
            self._put(checkpoint.read_shards(shards), shards)
            # Of shards of other members only parameters are read, because optimizer state is twice as large.
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
            # Only once: when a change of view adds shards later, the model may be in use.
            if not self._has_parameters:
                self._write(state.shard, state.parameters)
            if state.shard in kept:
                self._states[state.shard] = self._optimizer.take_over(state, self._open().manifest.optimizer)

    def _write(self, shard: int, parameters: Tensor) -> None:
        place = self._model.layout.shards[shard]
        with self._alone():  # a backup may become the last member, and train before all is read
            if not self._alone.is_overwritten(shard) and self._model.has(place):
                self._model.parameters_of(place).copy_(parameters)


def _count(pieces: Iterable[Mapping[str, Any]]) -> int:
    """Return the largest number of steps that a piece counts, or -1 if none counts steps."""
    return max((int(piece["step"]) for piece in pieces if "step" in piece), default=-1)


def _error(resume: Resume, error: CheckpointError) -> Exception:
    """Return the exception for a checkpoint that cannot be read.

    A StateLostError ends only this life of the job. The next one starts from an older checkpoint, if there is a good
    one.
    """
    if isinstance(error, DamagedError):
        return StateLostError(f"the checkpoint that this job starts from is damaged: {error}")
    if resume.disks:  # perhaps a node was lost: the next life checks again what is left
        return StateLostError(f"the checkpoint that this job starts from cannot be read: {error}")
    return ConfigError(f"{resume} cannot be read: {error}")
