"""A member's durable checkpoints, as its engine drives them: states come in captured, a thread writes, events go out.

The engine's thread calls everything here; it waits for the disk only where states that are about to change have no room
beside those that are not written yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from elastrain import agent_messages as am
from elastrain import protocol as p
from elastrain.base.checkpoints import CheckpointOptions
from elastrain.base.resume import Resume, changes_so_far
from elastrain.checkpoint import Checkpointed, CheckpointPlan
from elastrain.errors import ConfigError, ElastrainError
from elastrain.runtime.durable.manifests import Begin, Described, hyper_of
from elastrain.runtime.durable.parts import PartInWriting, Room, WriterThread
from elastrain.runtime.durable.tidying import tidy
from elastrain.snapshot.durable.errors import CheckpointError, TakenError
from elastrain.snapshot.durable.manifest import BUFFERS, LOOP, Manifest, Part, name_of
from elastrain.snapshot.durable.owner import Claim, claim
from elastrain.snapshot.durable.places.opening import place_at
from elastrain.snapshot.durable.plain import pack_named
from elastrain.snapshot.durable.publishing import Staged, stage
from elastrain.snapshot.durable.writing import PartWriter
from elastrain.snapshot.state import ShardState
from elastrain.values import Record
from elastrain.world import View

CLOSE_S = 10.0
"""How long the end of a member waits for what its writer has begun."""
GIVE_UP_S = 600.0
"""A disk, or a store, that has not answered by then gives the checkpoint up: the end of the job waits for it."""


@dataclass(frozen=True, kw_only=True)
class Bearings:
    """Who writes, where, and how it tells. `say` speaks to the agent, if `has_agent`, else to nobody."""

    options: CheckpointOptions
    me: str
    job: str
    life: int
    resume: Resume | None
    """The checkpoint that this life started from."""
    tell: Callable[[p.Event], None]
    say: Callable[[am.FromWorker], None]
    has_agent: bool
    log: Callable[..., None]


@dataclass
class KeptLoop:
    """The loop's state for a checkpoint; its tensors are copied before the script may change them."""

    step: int
    text: str
    payload: Callable[[], list[Tensor]]
    tensors: list[Tensor] | None = None

    def copy(self) -> list[Tensor]:
        """Raises ConfigError where the script has changed them already."""
        if self.tensors is None:
            self.tensors = self.payload()
        return self.tensors


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The checkpoint that was begun last. `last_step`: of it, if the job is to be stopped with it."""

    began_s: float = 0.0
    open_step: int | None = None
    """Of it, until it is complete or given up."""
    last_step: int | None = None
    asked_s: float = 0.0
    """When one was asked for by the clock."""

    @property
    def since_s(self) -> float:
        """From when the clock counts to the next one."""
        return max(self.began_s, self.asked_s)


class Checkpoints:
    """Owns the parts that are being written, the manifest that waits for the agent, and the writer's thread."""

    def __init__(self, bearings: Bearings, described: Described) -> None:
        self.spec: dict[str, Any] = {}
        """What all members have in common, as it was told when this one joined."""
        self.room = Room(None)
        self._with = bearings
        self._described = described
        self._place = place_at(bearings.options.place)
        self._claim: Claim | None = None
        self._thread = WriterThread()
        self._parts: list[PartInWriting] = []
        self._payload: Callable[[], list[Tensor]] = list
        self._loop: KeptLoop | None = None
        self._staged: tuple[Manifest, Staged] | None = None
        self._newest = Newest()

    @property
    def plan(self) -> CheckpointPlan:
        options = self._with.options
        return CheckpointPlan(every_steps=options.every_steps, all_holders=options.layout == "local")

    def open(self) -> None:
        """Claim the place. Raises ConfigError where it is another job's; other problems are said when it is used."""
        try:
            self._claim = claim(self._place, self._with.job, take_over=self._with.options.resumes)
        except TakenError as error:
            raise ConfigError(str(error)) from None
        except CheckpointError as error:
            self._with.log("checkpoint_place", reason=str(error))
        self._thread.start()

    # --------------------------------------------------------------------------------------------- for the books

    def has_room(self, size_bytes: int) -> bool:
        return self.room.fits(size_bytes)

    def make_room(self, size_bytes: int) -> None:
        """At most as long as a member may be silent: what does not come to the disk by then is given up."""
        if not self.room.wait(size_bytes, CLOSE_S):
            for part in self._parts:
                self._thread.do(lambda part=part: part.fail("the disk is too slow for the memory there is"))  # type: ignore[misc]

    def take(self, step: int, state: ShardState) -> None:
        part = next((each for each in self._parts if each.step == step and state.shard in each.shards), None)
        if part is None:
            return
        size_bytes = state.nbytes
        self.room.take(size_bytes)

        def write() -> None:
            try:
                part.write(state)
            finally:
                self.room.free(size_bytes)

        self._thread.do(write)

    # -------------------------------------------------------------------------------------------- for the engine

    def use_loop(self, payload: Callable[[], list[Tensor]]) -> None:
        """The loop has come to a step; these are its tensors."""
        self._payload = payload

    def carry_out(self, command: p.Command) -> None:
        match command:
            case p.BeginPart():
                self._begin(command)
            case p.CaptureLoop():
                self._loop = KeptLoop(step=command.step, text=command.state, payload=self._payload)
            case p.WriteManifest():
                self._write_manifest(command)
            case p.EndCheckpoint():
                self._end(command)
            case p.Passed(record=record):
                self.passed(record)

    def passed(self, record: Record) -> None:
        """A step was committed: from now on the script may change what it has registered."""
        if self._loop is not None and self._loop.step < record.step:
            self._copy_loop()
        if record.checkpoint in (Checkpointed.TAKEN, Checkpointed.LAST):
            last = record.step if record.checkpoint is Checkpointed.LAST else None
            self._newest = Newest(began_s=time.monotonic(), open_step=record.step, last_step=last)

    def is_due(self, view: View | None, now_s: float) -> bool:
        """By the clock of the member of lowest rank. One that takes too long is given up by then."""
        newest = self._newest
        if newest.open_step is not None and now_s - newest.began_s > GIVE_UP_S:
            self._newest = replace(newest, open_step=None)
            problem = f"it is not written after {GIVE_UP_S:.0f} s"
            self._with.tell(p.PartWritten(step=newest.open_step, shards=(), told=(), problem=problem))
        every_s = self._with.options.every_s
        if not every_s or view is None or view.ids[0] != self._with.me or now_s - newest.since_s < every_s:
            return False
        has_begun, self._newest = newest.since_s > 0.0, replace(self._newest, asked_s=now_s)
        return has_begun  # the first one is due when so much time has passed

    def settled(self, message: am.CheckpointSettled) -> None:
        """The agent has put the record of the checkpoint in the store, or may not."""
        if self._staged is not None and self._staged[0].step == message.step:
            manifest, staged = self._staged
            self._staged = None
            self._thread.do(lambda: self._publish(manifest, staged, message.problem))

    def close(self) -> None:
        """After a while at the most."""
        self._thread.close(CLOSE_S)
        if self._claim is not None:
            self._claim.release()

    # --------------------------------------------------------------------------------------------------- inside

    def _begin(self, command: p.BeginPart) -> None:
        name = name_of(self._with.life, command.step)
        self._parts.append(PartInWriting(command, self._place, name, self._with.me, self._with.tell))

    def _copy_loop(self) -> None:
        assert self._loop is not None
        try:
            self._loop.copy()
        except ElastrainError as error:
            step, self._loop = self._loop.step, None
            self._with.tell(p.PartWritten(step=step, shards=(), told=(), problem=str(error)))

    def _write_manifest(self, command: p.WriteManifest) -> None:
        if self._loop is not None and self._loop.step == command.record.step:
            self._copy_loop()
        loop, time_s = self._loop, time.time()
        if loop is not None:
            self._thread.do(lambda: self._stage(command, loop, time_s))

    def _end(self, command: p.EndCheckpoint) -> None:
        for part in [part for part in self._parts if part.step == command.step]:
            self._parts.remove(part)
            part.is_over = True
            self._thread.do(part.give_up)
        if self._staged is not None and command.reason:
            _, staged = self._staged
            self._staged = None
            self._thread.do(staged.give_up)
        if self._loop is not None and self._loop.step == command.step:
            self._loop = None
        self._newest = replace(self._newest, open_step=None)
        self._with.log("checkpoint", step=command.step, reason=command.reason)
        if command.is_told and command.reason:
            is_last = command.step == self._newest.last_step
            self._with.say(am.CheckpointEnded(step=command.step, reason=command.reason, last=is_last))

    # ------------------------------------------------------------------------------------- in the writer's thread

    def _stage(self, command: p.WriteManifest, loop: KeptLoop, time_s: float) -> None:
        step = command.record.step
        try:
            begin = Begin(
                job=self._with.job,
                life=self._with.life,
                time_s=time_s,
                spec=self.spec,
                hyper=hyper_of(loop.text),
                changes=changes_so_far(self._with.resume, self.spec),
            )
            manifest = self._described.manifest(begin, command.record, command.told, self._attach(step, loop))
            staged = stage(self._place, manifest)
        except CheckpointError as error:
            self._with.tell(p.ManifestWritten(step=step, reason=str(error)))
            return
        if not self._with.has_agent:
            self._publish(manifest, staged, "")
            return
        self._staged = manifest, staged
        self._with.say(am.CheckpointReady(step=step, name=manifest.name, size_bytes=manifest.size_bytes))

    def _attach(self, step: int, loop: KeptLoop) -> dict[str, tuple[Part, ...]]:
        writer = PartWriter(self._place, name_of(self._with.life, step), writer=f"{self._with.me}-loop")
        try:
            found: dict[str, tuple[Part, ...]] = {LOOP: (writer.attach(loop.text, loop.copy()),)}
            if buffers := self._described.buffers():
                found[BUFFERS] = (writer.attach(*pack_named(buffers)),)
            writer.finish()
        except CheckpointError:
            writer.give_up()
            raise
        return found

    def _publish(self, manifest: Manifest, staged: Staged, problem: str) -> None:
        try:
            if problem:
                raise CheckpointError(problem)
            if self._claim is not None:
                self._claim.check()
            staged.publish()
        except CheckpointError as error:
            staged.give_up()
            self._with.tell(p.ManifestWritten(step=manifest.step, reason=str(error)))
            return
        self._with.log(
            "checkpoint_written",
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            took_s=time.monotonic() - self._newest.began_s,
        )
        self._with.tell(p.ManifestWritten(step=manifest.step, reason=""))
        took_s = time.monotonic() - self._newest.began_s
        ended = am.CheckpointEnded(
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            took_s=took_s,
            last=manifest.step == self._newest.last_step,
        )
        self._with.say(ended)
        for sentence in tidy(self._place, keep=self._with.options.keep):
            self._with.log("checkpoint_tidied", reason=sentence)
