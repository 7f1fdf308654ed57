"""The newest step that this member has passed: its record, who holds what since then, and which parameters are here."""

from __future__ import annotations

from elastrain.member.parameters import Parameters
from elastrain.member.roles import Roles
from elastrain.member.shortage import Shortage
from elastrain.messages import (
    Ack,
    Boundary,
    CheckpointOver,
    Copied,
    Damaged,
    Digests,
    Doubt,
    Evidence,
    Gradient,
    Message,
    Partial,
    PartReport,
    ShardCopy,
    Trial,
    WriteInstead,
)
from elastrain.pipeline.plan import PipelinePlan
from elastrain.scaling import Scaler
from elastrain.values import Record, Shape, Vote


class Commit:
    """Owns the record, and the roles and parameters that belong to its step."""

    def __init__(self, me: str, shape: Shape) -> None:
        self.step = shape.initial.step
        """The newest committed step; that of the initial state until something is committed."""
        self.record: Record | None = None
        """The record of `step`; None while the initial state stands."""
        self.roles = Roles(me)
        self.shortage = Shortage()
        self.parameters = Parameters(len(shape.shards), self.step)
        self._initial_step = self.step
        self._first_scaler = shape.initial.scaler or shape.loss_scale.start

    @property
    def is_initial(self) -> bool:
        """Nothing has been committed that this member knows of: all that counts is what the job starts from."""
        return self.step == self._initial_step

    def advance(self, step: int, record: Record | None) -> None:
        """Hold the record of a newer step. A member that has heard of a commit has passed it, and never goes back."""
        self.step, self.record = step, record
        self.parameters.expect(step)

    def next_scaler(self) -> Scaler:
        """The loss scaling of the step after this one."""
        # From the record and not from what this member has seen: a newcomer scales as all others do.
        return self._first_scaler if self.record is None else self.record.next_scaler

    @property
    def plan(self) -> PipelinePlan | None:
        """Who computes which blocks of the step after this one; None: all compute whole runs."""
        return None if self.record is None else self.record.plan

    def is_ahead(self, message: Message) -> bool:
        """Whether the message belongs to a step that this member reaches later, on its own or by another message."""
        # The first kinds belong to the open step, which is one further than the committed one.
        match message:
            case Partial() | Gradient() | Ack() | Vote() | Damaged():
                return message.step > self.step + 1
            case Digests() | ShardCopy() | Copied() | Doubt() | Evidence() | Trial():
                return message.step > self.step
            case Boundary():
                return message.name.step > self.step + 1
            case PartReport() | WriteInstead() | CheckpointOver():
                return message.step > self.step
            # The other kinds belong to no step, and are served whenever they come.
            case _:
                return False
