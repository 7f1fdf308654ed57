"""What a simulated member writes of durable checkpoints: `runtime.durable.checkpoints` in virtual time.

Parts take their time, one after the other. A manifest waits for the agent's answer. Whoever dies in between leaves
what was written until then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import Checkpointed
from elastrain.protocol import agent_messages as am
from elastrain.snapshot.durable.manifest import name_of
from tests.sim.job.disk import Disk, Manifest

if TYPE_CHECKING:
    from tests.sim.job.member import MemberProcess

_KEEP = 2
_PART_S = (0.02, 0.1, 0.6)


class SimWriter:
    """Of one member."""

    def __init__(self, process: MemberProcess, disk: Disk) -> None:
        self._process, self._sim = process, process.sim
        self._disk, self._life = disk, process.life.number
        self._is_writing = False
        self._waiting: p.WriteManifest | None = None

    def carry_out(self, command: p.Command) -> bool:
        """False where the books have to do it."""
        match command:
            case p.BeginPart():
                self._sim.disk.parts.append(command)
            case p.CaptureLoop():
                self._sim.kept_loop[command.step] = command.state
            case p.WriteManifest():
                self._soon(lambda: self._stage(command))
            case p.EndCheckpoint():
                self._sim.disk.end(command.step)
                self._waiting = None if command.reason else self._waiting
                if command.is_told and command.reason:
                    is_last = self._sim.machine.checkpointing.is_last
                    self._process.link.say(am.CheckpointEnded(step=command.step, reason=command.reason, last=is_last))
            case _:
                return False
        return True

    def look(self) -> None:
        """A state may have come: its part is written, if no other one is."""
        if not self._is_writing and self._sim.disk.has_work:
            self._is_writing = True
            self._process.later(self._process.clock.rng.choice(_PART_S), self._write)

    def settled(self, message: am.CheckpointSettled) -> None:
        """The agent's answer: whether it may become visible."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and waiting.record.step == message.step:
            self._soon(lambda: self._publish(waiting, message.problem))

    def _soon(self, act: object) -> None:
        self._process.later(self._process.clock.soon(), act)  # type: ignore[arg-type]

    def _tell(self, event: p.Event) -> None:
        self._process.handover.tell(event)

    def _write(self) -> None:
        self._is_writing = False
        if self._sim.disk.has_work:
            self._sim.disk.is_full = self._disk.is_full
            written = self._sim.disk.write()
            if not written.problem:
                self._disk.write(self._life, written.step, f"{self._process.id}-{written.shards[0]}")
            self._tell(written)
        self.look()

    def _stage(self, command: p.WriteManifest) -> None:
        self._waiting = command
        step = command.record.step
        self._process.link.say(am.CheckpointReady(step=step, name=name_of(self._life, step), size_bytes=0))

    def _publish(self, command: p.WriteManifest, problem: str) -> None:
        step = command.record.step
        if not problem:
            self._process.life.checks.members.durable(self._sim, command)
            states = dict(each.split(":") for each in command.told)
            self._disk.publish(
                self._life,
                Manifest(
                    step=step,
                    states=tuple(int(states[str(shard)]) for shard in range(len(self._sim.shape.shards))),
                    loop=self._sim.kept_loop[step],
                    scaler=command.record.next_scaler,
                ),
            )
            self._process.world.say(f"{self._process.id} makes {name_of(self._life, step)} visible")
        self._tell(p.ManifestWritten(step=step, reason=problem, told=""))
        if not problem and self._process.alive:
            is_last = command.record.checkpoint is Checkpointed.LAST
            self._process.link.say(am.CheckpointEnded(step=step, last=is_last))
            self._process.later(self._process.clock.rng.choice(_PART_S), lambda: self._disk.tidy(_KEEP))
