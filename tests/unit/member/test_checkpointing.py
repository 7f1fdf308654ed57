"""A member's part in durable checkpoints: what it writes, what it collects, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from elastrain import protocol as p
from elastrain.job.checkpoint_plan import LOOP, Checkpointed, CheckpointPlan
from elastrain.job.values import Contribution, Shape, ShardShape
from elastrain.job.world import Member, View
from elastrain.member.checkpointing import NO_LOOP
from elastrain.member.loop_stages import LoopStage
from elastrain.member.member_machine import MemberMachine
from elastrain.protocol.messages import CheckpointOver, PartReport

Kind = TypeVar("Kind")
SHAPE = Shape(runs=1, blocks=1, shards=tuple(ShardShape(size_bytes=8, lanes=(0,)) for _ in range(2)), backups=0)
TOLD = Contribution(1.0, 2.0, 2, 3)


class Alone:
    """A job of one, driven by hand; `done` is all that it was told to do."""

    def __init__(self, plan: CheckpointPlan, shape: Shape = SHAPE) -> None:
        self.core = MemberMachine(me="a", shape=shape, checkpoints=plan)
        self.done: list[p.Command] = []
        members = (Member(id="a", node="n", address="x"),)
        self.tell(p.Viewed(view=View(generation=1, members=members, reason="start")))
        self.tell(p.Began(step=0, settings="lr", state="0"))
        self.tell(p.Ready())

    def tell(self, event: p.Event) -> None:
        commands = self.core.handle(event)
        self.done += commands
        for command in commands:
            if isinstance(command, p.FinishGradients):
                self.tell(p.GradientsFinished(step=command.step, square_norms=dict.fromkeys(command.shards, 4.0)))
            elif isinstance(command, p.AskToCommit):
                self.tell(p.CommitAllowed())
            elif isinstance(command, p.Compute) and command.probed:
                self.tell(p.Checked(step=command.step, run=command.run, check=None))

    def compute(self, step: int) -> None:
        self.tell(p.BlockDone(step=step, run=0, block=0, contribution=TOLD, touched=1))
        self.tell(p.Ready())

    def go_on(self, step: int) -> None:
        self.tell(p.Began(step=step, settings="lr", state=str(step)))
        self.tell(p.Ready())

    def all(self, kind: type[Kind]) -> list[Kind]:
        return [command for command in self.done if isinstance(command, kind)]

    def said(self) -> list[Checkpointed]:
        return [passed.record.checkpoint for passed in self.all(p.Passed)]

    def written(self, step: int, problem: str = "") -> p.PartWritten:
        shards = () if problem else (0, 1)
        return p.PartWritten(step=step, shards=shards, told=tuple(f"at {s}" for s in shards), problem=problem)


def test_every_second_step_is_written_and_made_visible() -> None:
    job = Alone(CheckpointPlan(every_steps=2))
    job.compute(0)
    job.go_on(1)
    job.compute(1)
    assert job.said() == [Checkpointed.NO, Checkpointed.TAKEN]
    assert job.all(p.BeginPart) == [p.BeginPart(step=1, shards=(0, 1))]
    apply, capture = job.done.index(job.all(p.Apply)[1]), job.done.index(job.all(p.Capture)[0])
    assert apply < capture
    job.tell(job.written(1))
    assert not job.all(p.WriteManifest)  # the loop's state of the next step is still to come
    job.go_on(2)
    assert job.all(p.CaptureLoop) == [p.CaptureLoop(step=1, state="2", is_written=False)]
    assert [manifest.told for manifest in job.all(p.WriteManifest)] == [("at 0", "at 1")]
    job.tell(p.ManifestWritten(step=1, reason="", told=""))
    assert job.all(p.EndCheckpoint) == [p.EndCheckpoint(step=1, reason="", is_told=True, told="")]


def test_the_next_one_is_passed_over_while_one_is_being_written() -> None:
    job = Alone(CheckpointPlan(every_steps=1))
    for step in range(3):
        job.compute(step)
        job.go_on(step + 1)
        if step == 1:
            job.tell(job.written(0))
            job.tell(p.ManifestWritten(step=0, reason="", told=""))
    assert job.said() == [Checkpointed.TAKEN, Checkpointed.PASSED_OVER, Checkpointed.TAKEN]


def test_a_wish_stays_until_a_step_has_become_a_checkpoint() -> None:
    job = Alone(CheckpointPlan(every_steps=1))
    job.compute(0)
    job.go_on(1)
    job.tell(p.CheckpointWanted(last=False))
    job.core.machine.checkpointing._plan = CheckpointPlan()
    job.compute(1)
    assert job.said()[-1] is Checkpointed.NO
    job.tell(job.written(0))
    job.tell(p.ManifestWritten(step=0, reason="", told=""))
    job.go_on(2)
    job.compute(2)
    job.go_on(3)
    assert job.said()[-1] is Checkpointed.TAKEN
    job.tell(job.written(2))
    job.tell(p.ManifestWritten(step=2, reason="", told=""))
    job.compute(3)
    assert job.said()[-1] is Checkpointed.NO


def test_a_disk_that_takes_nothing_gives_one_checkpoint_up_and_the_next_is_tried() -> None:
    job = Alone(CheckpointPlan(every_steps=1))
    job.compute(0)
    job.tell(job.written(0, problem="no space left on device"))
    assert job.all(p.EndCheckpoint) == [
        p.EndCheckpoint(step=0, reason="a: no space left on device", is_told=True, told="")
    ]
    assert job.all(p.DropCaptures) == [p.DropCaptures(step=0)]
    job.go_on(1)
    job.compute(1)
    assert job.said() == [Checkpointed.TAKEN, Checkpointed.TAKEN]


def test_nothing_is_committed_after_the_last_checkpoint() -> None:
    job = Alone(CheckpointPlan())
    job.tell(p.CheckpointWanted(last=True))
    job.compute(0)
    job.go_on(1)
    job.compute(1)
    assert job.said() == [Checkpointed.LAST]
    job.tell(job.written(0))
    assert len(job.all(p.WriteManifest)) == 1
    job.tell(p.ManifestWritten(step=0, reason="", told=""))
    assert job.said() == [Checkpointed.LAST]


def test_the_end_of_the_job_waits_for_what_is_being_written() -> None:
    job = Alone(CheckpointPlan(every_steps=1))
    job.compute(0)
    job.tell(p.Began(step=1, settings="lr", state="1"))
    job.tell(p.LoopEnded(step=1))
    assert not job.all(p.Leave)
    job.tell(job.written(0))
    job.tell(p.ManifestWritten(step=0, reason="", told=""))
    assert len(job.all(p.Leave)) == 1


@pytest.mark.parametrize("is_passed_over", [False, True])
def test_a_wish_that_comes_after_the_last_vote_makes_the_last_step_a_checkpoint(is_passed_over: bool) -> None:
    job = Alone(CheckpointPlan(every_steps=int(is_passed_over)))
    job.compute(0)
    job.go_on(1)
    job.compute(1)
    if is_passed_over:
        job.tell(job.written(0))
        job.tell(p.ManifestWritten(step=0, reason="", told=""))
    else:
        job.tell(p.CheckpointWanted(last=False))
    assert job.said()[-1] is (Checkpointed.PASSED_OVER if is_passed_over else Checkpointed.NO)
    job.tell(p.Began(step=2, settings="lr", state="2"))
    job.tell(p.LoopEnded(step=2))
    assert job.all(p.BeginPart)[-1] == p.BeginPart(step=1, shards=(0, 1))
    assert job.all(p.Capture)[-1].step == 1
    assert job.all(p.CaptureLoop)[-1] == p.CaptureLoop(step=1, state="2", is_written=False)
    job.tell(job.written(1))
    manifest = job.all(p.WriteManifest)[-1]
    assert (manifest.record.step, manifest.record.checkpoint) == (1, Checkpointed.TAKEN)
    assert not job.all(p.Leave)
    job.tell(p.ManifestWritten(step=1, reason="", told=""))
    assert len(job.all(p.Leave)) == 1
    assert len(job.all(p.Passed)) == 2  # the commit is told once


def test_a_disk_that_takes_nothing_does_not_hold_the_end_of_the_job_up() -> None:
    job = Alone(CheckpointPlan())
    job.compute(0)
    job.tell(p.CheckpointWanted(last=False))
    job.tell(p.Began(step=1, settings="lr", state="1"))
    job.tell(p.LoopEnded(step=1))
    job.tell(job.written(0, problem="no space left on device"))
    assert [ended.reason for ended in job.all(p.EndCheckpoint)] == ["a: no space left on device"]
    assert len(job.all(p.Leave)) == 1


def test_a_job_that_commits_nothing_has_nothing_to_write() -> None:
    job = Alone(CheckpointPlan())
    job.tell(p.CheckpointWanted(last=False))
    job.core.machine.loop.stage = LoopStage.BODY
    job.tell(p.LoopEnded(step=0))
    assert len(job.all(p.Leave)) == 1
    assert not job.all(p.BeginPart)


def test_who_reports_of_a_checkpoint_that_is_over_is_told_how_it_ended() -> None:
    job = Alone(CheckpointPlan(every_steps=1), replace(SHAPE, runs=1))
    job.compute(0)
    job.tell(job.written(0, problem="no space"))
    report = PartReport(step=0, shards=(), told=(), lacking=(), problem="")
    job.tell(p.Arrived(source="b", generation=1, message=report))
    sent = [c.message for c in job.all(p.SendMessage)]
    assert sent == [CheckpointOver(step=0, reason="a: no space", told="")]


def test_on_a_disk_of_its_own_the_loop_is_a_part_too_and_the_manifest_goes_to_all() -> None:
    job = Alone(CheckpointPlan(every_steps=1, all_holders=True))
    job.compute(0)
    job.go_on(1)
    assert job.all(p.CaptureLoop) == [p.CaptureLoop(step=0, state="1", is_written=True)]
    job.tell(job.written(0))
    assert not job.all(p.WriteManifest)  # the loop's state is not on the disk yet
    job.tell(p.PartWritten(step=0, shards=(LOOP,), told=("loop",), problem=""))
    (command,) = job.all(p.WriteManifest)
    assert (command.told, command.loops) == (("at 0", "at 1"), ("loop",))
    job.tell(p.ManifestWritten(step=0, reason="", told="manifest"))
    assert job.all(p.EndCheckpoint) == [p.EndCheckpoint(step=0, reason="", is_told=True, told="manifest")]


def test_where_no_disk_takes_the_loop_the_checkpoint_is_given_up() -> None:
    job = Alone(CheckpointPlan(every_steps=1, all_holders=True))
    job.compute(0)
    job.go_on(1)
    lacking = PartReport(step=0, shards=(), told=(), lacking=(LOOP,), problem="")
    job.tell(p.Arrived(source="a", generation=1, message=lacking))
    assert [ended.reason for ended in job.all(p.EndCheckpoint)] == [NO_LOOP]
