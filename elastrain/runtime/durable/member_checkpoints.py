"""A member's durable checkpoints. The engine thread delivers captured states, and the writer thread writes them.

The engine waits for the disk only if states are about to change and there is no room for their copies. If no copy can
ever fit, the state itself is written while the engine waits.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from elastrain import protocol as p
from elastrain.base.checkpoint_settings import CheckpointOptions
from elastrain.base.resume import Resume, changes_so_far
from elastrain.errors import ElastrainError
from elastrain.job.checkpoint_plan import LOOP, Checkpointed, CheckpointPlan
from elastrain.job.values import Record
from elastrain.job.world import View
from elastrain.protocol import agent_messages as am
from elastrain.runtime.durable.checkpoint_parts import CLOSE_S, Captured, WriterThread
from elastrain.runtime.durable.disk import CheckpointDisk, kept_text, told_by_keepers
from elastrain.runtime.durable.kept_loop import AtStep, KeptLoop
from elastrain.runtime.durable.manifests import Begin, Described, hyper_of
from elastrain.snapshot.durable.errors import CheckpointError
from elastrain.snapshot.durable.manifest import Manifest, Part, name_of
from elastrain.snapshot.durable.publishing import Staged, stage

GIVE_UP_S = 600.0
"""Seconds after which a checkpoint is given up if the disk or store does not answer. The job's end waits for it."""


@dataclass(frozen=True, kw_only=True)
class Bearings:
    """The identity of the writer, and its connections to the engine and the agent.

    `say` sends to the agent if `has_agent`, else nowhere. `wake` wakes the engine, from any thread.
    """

    options: CheckpointOptions
    me: str
    job: str
    life: int
    resume: Resume | None
    """The checkpoint that this life started from."""
    tell: Callable[[p.Event], None]
    wake: Callable[[], None]
    say: Callable[[am.FromWorker], None]
    has_agent: bool
    log: Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """A manifest that waits until the agent has recorded the checkpoint. `told`: see `protocol.ManifestWritten`."""

    manifest: Manifest
    staged: Staged
    told: str


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest checkpoint that was begun. `last_step` is its step if the job stops with it."""

    began_s: float = 0.0
    open_step: int | None = None
    """Step of the checkpoint until it is complete or given up."""
    last_step: int | None = None
    asked_s: float = 0.0
    """Time at which the last checkpoint was requested by the clock."""

    @property
    def since_s(self) -> float:
        """Time from which the interval to the next checkpoint counts."""
        return max(self.began_s, self.asked_s)


class Checkpoints:
    """The checkpoints of a member: the kept state of the loop, the waiting manifest, and the writer thread."""

    def __init__(self, bearings: Bearings, described: Described) -> None:
        self.spec: dict[str, Any] = {}
        """The settings that all members share, set when this member joined."""
        self._with = bearings
        self._described = described
        self._disk = CheckpointDisk(bearings.options, bearings.job, bearings.log, bearings.resume)
        self._thread = WriterThread(self._on_failed)
        self.captured = Captured(self._thread, bearings.tell, bearings.wake, self._apart)
        self.at_step = AtStep()
        self._loop: KeptLoop | None = None
        self._waiting: Waiting | None = None
        self._newest = Newest()
        self.has_newest = bearings.resume is not None
        """True if the newest committed step is a complete checkpoint."""
        self._committed = -1

    @property
    def plan(self) -> CheckpointPlan:
        """The checkpoint settings that the protocol needs."""
        options = self._with.options
        return CheckpointPlan(every_steps=options.every_steps, all_holders=options.is_local)

    def open(self) -> None:
        """Claim the place. Raises ConfigError if it is another job's; other problems appear when it is used."""
        self._disk.open()
        self._thread.start()

    def begin(self) -> None:
        """Take over the place that this job resumes from, once a view is complete. Raises as `open`."""
        self._disk.take_over()

    def use_loop(self, payload: Callable[[], list[Tensor]]) -> None:
        """Set the tensors of the loop at its present step."""
        self.at_step.payload = payload

    def carry_out(self, command: p.Command) -> None:
        """Carry out a command about checkpoints. Other commands are ignored."""
        match command:
            case p.BeginPart():
                self._begin(command)
            case p.CaptureLoop():
                self._capture_loop(command)
            case p.WriteManifest():
                self._write_manifest(command)
            case p.EndCheckpoint():
                self._end(command)
            case p.Passed(record=record):
                self.passed(record)

    def passed(self, record: Record) -> None:
        """Note a committed step, and copy the kept loop state before the script may change it."""
        self._committed, self.has_newest = record.step, False
        if self._loop is not None and self._loop.step < record.step:
            self._copy_loop()
        if record.checkpoint in (Checkpointed.TAKEN, Checkpointed.LAST):
            last = record.step if record.checkpoint is Checkpointed.LAST else None
            if last is not None:
                self._thread.hurry()
            self._newest = Newest(began_s=time.monotonic(), open_step=record.step, last_step=last)

    def is_due(self, view: View | None, now_s: float) -> bool:
        """Return True if a checkpoint is due by the clock of rank 0. Also give up one that takes too long."""
        newest = self._newest
        if newest.open_step is not None and now_s - newest.began_s > GIVE_UP_S:
            self._newest = replace(newest, open_step=None)
            problem = f"it is not written after {GIVE_UP_S:.0f} s"
            self._with.tell(p.PartWritten(step=newest.open_step, shards=(), told=(), problem=problem))
        every_s = self._with.options.every_s
        if not every_s or view is None or view.ids[0] != self._with.me or now_s - newest.since_s < every_s:
            return False
        has_begun, self._newest = newest.since_s > 0.0, replace(self._newest, asked_s=now_s)
        return has_begun  # the first call only starts the interval

    def settled(self, message: am.CheckpointSettled) -> None:
        """Publish the waiting manifest, or give it up, after the agent's answer about the store."""
        waiting = self._waiting
        if waiting is not None and waiting.manifest.step == message.step:
            self._waiting = None
            self._thread.do(lambda: self._publish(waiting, message.problem))

    def hurried(self) -> AbstractContextManager[None]:
        """Give the writer thread normal priority while the ended loop waits for it."""
        return self._thread.hurried()

    def close(self) -> None:
        """Finish queued writes within CLOSE_S, and release the place."""
        self._thread.close(CLOSE_S)
        self._disk.close()

    def _begin(self, command: p.BeginPart) -> None:
        part = self.captured.begin(command, self._disk.place, name_of(self._with.life, command.step), self._with.me)
        self._thread.do(lambda: part.check(self._disk.check))

    def _capture_loop(self, command: p.CaptureLoop) -> None:
        if self._newest.open_step is None:  # requested after the votes on the last step, so no record names it
            self._newest = Newest(began_s=time.monotonic(), open_step=command.step)
        now = self.at_step
        loop = self._loop = KeptLoop(command.step, command.state, now.payload, now.buffers, now.made)
        if command.is_written:
            self._copy_loop()
            if self._loop is not None:
                self._thread.do(lambda: self._write_loop(loop))

    def _copy_loop(self) -> None:
        assert self._loop is not None
        self.captured.blocked.begin()
        try:
            self._loop.copy()
        except ElastrainError as error:
            step, self._loop = self._loop.step, None
            self._with.tell(p.PartWritten(step=step, shards=(), told=(), problem=str(error)))
        self.captured.blocked.end()

    def _write_manifest(self, command: p.WriteManifest) -> None:
        if self._loop is not None and self._loop.step == command.record.step:
            self._copy_loop()
        loop, time_s = self._loop, time.time()
        if loop is not None:
            self._thread.do(lambda: self._stage(command, loop, time_s))

    def _end(self, command: p.EndCheckpoint) -> None:
        self.captured.end(command.step)
        if self._waiting is not None and command.reason:
            self._thread.do(partial(self._apart, self._waiting.staged.give_up))
            self._waiting = None
        if self._loop is not None and self._loop.step == command.step:
            self._loop = None
        self._newest = replace(self._newest, open_step=None)
        self.has_newest = self.has_newest or (not command.reason and command.step == self._committed)
        self._with.log("checkpoint", step=command.step, reason=command.reason, blocked_s=self.captured.blocked.take())
        if command.told:
            self._thread.do(lambda: self._apart(lambda: self._disk.keep(self._with.life, command.step, command.told)))
        if command.is_told and command.reason:
            is_last = command.step == self._newest.last_step
            self._with.say(am.CheckpointEnded(step=command.step, reason=command.reason, last=is_last))
            self._thread.do(lambda: self._remove_older(command.step))

    def _on_failed(self, error: Exception) -> None:
        """Give the open checkpoint up after an unexpected error, because an ended loop may wait for it."""
        self._with.log("checkpoint_failed", reason="".join(traceback.format_exception(error)))
        if (step := self._newest.open_step) is not None:
            problem = f"{type(error).__name__}: {error}"
            self._with.tell(p.PartWritten(step=step, shards=(), told=(), problem=problem))

    def _apart(self, task: Callable[[], None]) -> None:
        """Run a task that no checkpoint waits for, and log its errors."""
        try:
            task()
        except CheckpointError as error:
            self._with.log("checkpoint_tidied", reason=str(error))
        except Exception as error:  # noqa: BLE001  # as in `_on_failed`
            self._with.log("checkpoint_failed", reason="".join(traceback.format_exception(error)))
            self._with.say(
                am.Note(fields={"noticed": f"while tidying up checkpoints: {type(error).__name__}: {error}"})
            )

    def _write_loop(self, loop: KeptLoop) -> None:
        """Write the loop's state to this node's own disk."""
        shards: tuple[int, ...] = (LOOP,)
        told, problem = "", ""
        try:
            told = self._disk.told(name_of(self._with.life, loop.step), self._attach(loop))
        except CheckpointError as error:
            shards, problem = (), str(error)
        self._with.tell(p.PartWritten(step=loop.step, shards=shards, told=(told,) if shards else (), problem=problem))

    def _attach(self, loop: KeptLoop) -> dict[str, tuple[Part, ...]]:
        name = name_of(self._with.life, loop.step)
        for event in loop.made:
            event.wait()  # in the stream of this thread, which copies them to the host
        return self._disk.attach(name, self._with.me, (loop.text, loop.copy()), self._described.buffers(loop.buffers))

    def _stage(self, command: p.WriteManifest, loop: KeptLoop, time_s: float) -> None:
        step = command.record.step
        try:
            # It may be visible already, if the member that published it was lost before it could report.
            there = self._disk.find(name_of(self._with.life, step))
            attachments, verified = told_by_keepers(command.loops)
            manifest = there or self._manifest(command, loop, time_s, attachments or self._attach(loop))
            told = kept_text(manifest, verified) if command.loops else ""
            if there is not None:
                self._finish(manifest, told)
                return
            waiting = Waiting(manifest=manifest, staged=stage(self._disk.place, manifest), told=told)
        except CheckpointError as error:
            self._with.tell(p.ManifestWritten(step=step, reason=str(error), told=""))
            return
        if not self._with.has_agent:
            self._publish(waiting, "")
            return
        self._waiting = waiting
        self._with.say(am.CheckpointReady(step=step, name=manifest.name, size_bytes=manifest.size_bytes))

    def _manifest(
        self, command: p.WriteManifest, loop: KeptLoop, time_s: float, attachments: dict[str, tuple[Part, ...]]
    ) -> Manifest:
        begin = Begin(
            job=self._with.job,
            life=self._with.life,
            time_s=time_s,
            spec=self.spec,
            hyper=hyper_of(loop.text),
            changes=changes_so_far(self._with.resume, self.spec),
        )
        return self._described.manifest(begin, command.record, command.told, attachments)

    def _publish(self, waiting: Waiting, problem: str) -> None:
        manifest = waiting.manifest
        try:
            if problem:
                raise CheckpointError(problem)
            self._disk.check()
            waiting.staged.publish()
        except CheckpointError as error:
            waiting.staged.give_up()
            self._with.tell(p.ManifestWritten(step=manifest.step, reason=str(error), told=""))
            return
        self._finish(manifest, waiting.told)

    def _finish(self, manifest: Manifest, told: str) -> None:
        """Report that the checkpoint is visible, and remove old ones."""
        took_s = time.monotonic() - self._newest.began_s
        self._with.log("checkpoint_written", step=manifest.step, size_bytes=manifest.size_bytes, took_s=took_s)
        self._with.tell(p.ManifestWritten(step=manifest.step, reason="", told=told))
        ended = am.CheckpointEnded(
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            took_s=took_s,
            last=manifest.step == self._newest.last_step,
        )
        self._with.say(ended)
        self._remove_older(manifest.step)

    def _remove_older(self, step: int) -> None:
        """Remove old checkpoints after that of `step` is complete or given up."""
        self._apart(lambda: self._disk.remove_older(self._with.life, step))
