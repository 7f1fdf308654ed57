"""What a simulated member writes of checkpoints on its node's own disk: production's `Checkpoints` over symbols.

Its thread works in virtual time; a state is the text of its symbol. Whoever dies leaves what was written until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastrain import protocol as p
from elastrain.job.scaling import Scaler
from elastrain.protocol import agent_messages as am
from elastrain.runtime.durable.checkpoint_parts import Apart, Captured, PartInWriting
from elastrain.runtime.durable.disk import CheckpointDisk, KeptCopy
from elastrain.runtime.durable.manifests import Described
from elastrain.runtime.durable.member_checkpoints import Bearings, Checkpoints, Waiting
from elastrain.snapshot.durable.manifest import Manifest
from elastrain.snapshot.durable.places.port import CheckpointPlace
from tests.sim.job import disk as sim_disk
from tests.sim.job.node_disks import NodeDisks, when
from tests.sim.member import Violation
from tests.sim.symbols import symbol

if TYPE_CHECKING:
    from tests.sim.job.member import MemberProcess

_PART_S = (0.002, 0.02, 0.15)
_TOLD = {"checkpoint_written", "checkpoint_tidied"}


class LocalWriter:
    """Of one member. See `writer.SimWriter`."""

    def __init__(self, process: MemberProcess, disks: NodeDisks) -> None:
        self._process, self._sim = process, process.sim
        resume = process.life.resume
        lives_before = resume.lives_before if resume is not None else 0
        bearings = Bearings(
            options=disks.options(process.node),
            me=process.id,
            job="job",
            life=process.life.number + lives_before,
            resume=resume,
            tell=process.handover.tell,
            wake=process.turn,
            say=process.link.say,
            has_agent=True,
            log=self._log,
        )
        self._checkpoints = _Checkpoints(bearings, process, disks)
        process.sim.ledger.capture_into(self._checkpoints.captured)

    def carry_out(self, command: p.Command) -> bool:
        """False where the books have to do it."""
        if isinstance(command, p.CaptureLoop):
            self._sim.kept_loop[command.step] = command.state
        self._checkpoints.carry_out(command)
        return isinstance(command, p.BeginPart | p.CaptureLoop | p.WriteManifest | p.EndCheckpoint)

    def look(self) -> None:
        """States are taken as they come."""

    def settled(self, message: am.CheckpointSettled) -> None:
        self._checkpoints.settled(message)

    def _log(self, event: str, **fields: Any) -> None:
        if event in _TOLD:
            self._process.world.say(f"{self._process.id}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))


class _Checkpoints(Checkpoints):
    def __init__(self, bearings: Bearings, process: MemberProcess, disks: NodeDisks) -> None:
        super().__init__(bearings, _SymbolsDescribed(len(process.sim.shape.shards)))
        thread: Any = _VirtualWriter(process)
        self._thread = thread
        self._process, self._disks = process, disks
        self._disk = _WatchedDisk(bearings, disks)
        self.captured = _CapturedSymbols(thread, bearings, self._apart, process, disks)

    def _publish(self, waiting: Waiting, problem: str) -> None:
        if not problem:
            self._look_at(waiting.manifest)
        super()._publish(waiting, problem)

    def _look_at(self, manifest: Manifest) -> None:
        """What is about to become visible is right."""
        told = tuple(f"{shard.index}:{shard.digest}" for shard in manifest.shards)
        sim, record = self._process.sim, SimpleNamespace(step=manifest.step)
        command: Any = SimpleNamespace(record=record, told=told, loops=())
        self._process.life.checks.members.durable(sim, command)
        scaler = manifest.counters["scaler"]
        there = sim_disk.Manifest(
            step=manifest.step,
            states=tuple(shard.digest for shard in manifest.shards),
            loop=sim.kept_loop[manifest.step],
            scaler=Scaler(**scaler),
        )
        self._disks.publish(manifest.name, there, manifest.files)


class _WatchedDisk(CheckpointDisk):
    """Whatever it removes, there is a checkpoint to go back to."""

    def __init__(self, bearings: Bearings, disks: NodeDisks) -> None:
        super().__init__(bearings.options, bearings.job, bearings.log)
        self._disks = disks

    def _keep(self, name: str, told: KeptCopy) -> None:
        before = self._disks.newest_anywhere()
        super()._keep(name, told)
        self._disks.at(self.place.location).read_back.update(self._verified)
        if when(self._disks.newest_anywhere()) < when(before):
            raise Violation(f"{before} is removed from {self.place.location}, and was the newest whole one")


@dataclass(kw_only=True)
class _SymbolState:
    """`ShardState`, as the writer of a part asks it."""

    shard: int
    version: int
    value: int
    nbytes: int = 1

    def pack(self) -> tuple[bytes, list[Any]]:
        return str(self.value).encode(), []

    def digest(self) -> int:
        return self.value

    def checksum(self) -> int:
        return symbol("state", self.value)


class _CapturedSymbols(Captured):
    """Production's, over symbols; whether there is room for copies the schedule says."""

    def __init__(self, thread: Any, bearings: Bearings, apart: Apart, process: MemberProcess, disks: NodeDisks) -> None:
        super().__init__(thread, bearings.tell, bearings.wake, apart)
        self._process, self._disks = process, disks

    def begin(self, command: p.BeginPart, place: CheckpointPlace, name: str, me: str) -> PartInWriting:
        part = super().begin(command, place, name, me)
        self._disks.contents[f"{name}/{part._writer._file}"] = frozenset(command.shards)
        return part

    def make_room(self, size_bytes: int, *, is_awaited: bool) -> bool:
        return self._process.sim.disk.has_room

    def take(self, step: int, digest: int | None, state: Any) -> None:
        copy: Any = _SymbolState(shard=state.shard, version=step, value=state.cell.value)
        super().take(step, digest, copy)

    def lend(self, step: int, digest: int | None, state: Any) -> None:
        self.take(step, digest, state)


class _SymbolsDescribed(Described):
    """A model without names: the shards have no pieces."""

    def __init__(self, shards: int) -> None:
        each = [SimpleNamespace(index=index, block=0, master_dtype="float32", numel=1) for index in range(shards)]
        self._layout: Any = SimpleNamespace(shards=each, blocks=["body"], leaves=())
        self._optimizer, self._groups, self._parameters = "", [], ()

    def buffers(self, kept: Any) -> dict[str, Any]:
        return {}


class _VirtualWriter:
    """`WriterThread`: one task after the other, each of which takes its time."""

    def __init__(self, process: MemberProcess) -> None:
        self._process = process
        self._tasks: deque[Callable[[], None]] = deque()

    def do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        if len(self._tasks) == 1:
            self._next()

    def _next(self) -> None:
        self._process.later(self._process.clock.rng.choice(_PART_S), self._work)

    def _work(self) -> None:
        self._tasks[0]()
        self._tasks.popleft()
        if self._tasks:
            self._next()

    def hurry(self) -> None: ...

    def hurried(self) -> AbstractContextManager[None]:
        return nullcontext()
