"""A loop on a device gets its next run while its present one lands, and leaves the step when all have landed."""

from __future__ import annotations

from elastrain import protocol as p
from elastrain.job.values import Check, Contribution, Shape, ShardShape
from elastrain.job.world import Member, View
from elastrain.member.member_machine import MemberMachine

SHAPE = Shape(runs=3, blocks=1, shards=(ShardShape(size_bytes=8, lanes=(0,)),), backups=0)
FIRST = View(generation=1, members=(Member(id="a", node="a"),))


class Alone:
    """A job of one, driven by hand. It says what the loop is given."""

    def __init__(self) -> None:
        self.core = MemberMachine(me="a", shape=SHAPE)
        self.probed: set[int] = set()
        self.tell(p.Viewed(view=FIRST))
        self.tell(p.Began(step=0, settings="lr", state="s"))

    def tell(self, event: p.Event) -> list[p.Command]:
        given = []
        for command in self.core.handle(event):
            match command:
                case p.Compute() | p.Advance():
                    given.append(command)
                    self.probed |= {command.run} if isinstance(command, p.Compute) and command.probed else set()
                case p.AskToCommit():
                    given += self.tell(p.CommitAllowed())
                case p.FinishGradients():
                    given += self.tell(p.GradientsFinished(step=0, square_norms=dict.fromkeys(command.shards, 4.0)))
                case p.ComputeDigests():
                    digests = dict.fromkeys(command.shards, 9)
                    given += self.tell(p.StatesDigested(step=command.step, digests=digests, published={}))
                case p.DigestParameters():
                    given += self.tell(p.ParametersDigested(turn=command.turn, digests={0: 5}))
        return given

    def gives(self, event: p.Event) -> list[int | str]:
        """Tell the core, and return the runs that the loop is given, or the names of other commands."""
        return [c.run if isinstance(c, p.Compute) else type(c).__name__ for c in self.tell(event)]

    def lands(self, run: int) -> list[int | str]:
        return [*self.computes(run), *self.gives(p.Ready())]

    def computes(self, run: int) -> list[int | str]:
        told = Contribution(1.0, 1.0, 1, 1)
        check = Check(micro_batch=run, loss=1.0, weight=1.0, digests=(7,))
        before = self.gives(p.Checked(step=0, run=run, check=check)) if run in self.probed else []
        return [*before, *self.gives(p.BlockDone(step=0, run=run, block=0, contribution=told, touched=1))]


def test_two_runs_are_outstanding_and_the_step_ends_behind_both() -> None:
    job = Alone()
    assert job.gives(p.Ready()) == [0]
    assert job.gives(p.Submitted()) == [1]
    assert job.gives(p.Submitted()) == [], "the device has memory for two"
    assert job.core.machine.step.runs.under_way == 3
    assert job.lands(0) == [2]
    assert job.gives(p.Submitted()) == []
    assert job.lands(1) == []
    assert job.lands(2) == ["Advance"]


def test_the_last_block_does_not_end_a_step_before_the_run_has_landed() -> None:
    job = Alone()
    for event in (p.Ready(), p.Submitted(), p.Submitted()):
        job.gives(event)
    job.lands(0)
    job.gives(p.Submitted())
    job.lands(1)
    assert job.computes(2) == []
    assert job.core.machine.commit.step == 0, "it is committed, and the loop is still in it"
    assert job.gives(p.Ready()) == ["Advance"]


def test_a_loop_that_has_not_asked_early_gets_one_run_at_a_time() -> None:
    job = Alone()
    assert job.gives(p.Ready()) == [0]
    assert job.lands(0) == [1]
    assert job.lands(1) == [2]
    assert job.lands(2) == ["Advance"]
