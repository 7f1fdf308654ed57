"""The lifecycle's corners that schedules seldom reach; the protocol itself is shown in tests/sim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastrain import protocol as p
from elastrain.integrity.arbitration import look_before_taking_over
from elastrain.job.checkpoint_plan import CheckpointVote
from elastrain.job.placement import Holders
from elastrain.job.values import Check, Contribution, Report, Shape, ShardShape, Vote, Wrong
from elastrain.job.world import Member, View
from elastrain.member.integrity.repair import TRIES_MAX
from elastrain.member.job_end import job_ends
from elastrain.member.member_machine import MemberMachine
from elastrain.member.state.runs import FinishedGradient
from elastrain.protocol.messages import (
    Ack,
    Copied,
    DigestReply,
    Digests,
    Doubt,
    EndsBefore,
    Gradient,
    Message,
    Partial,
    RepeatUpdate,
    ShardCopy,
)

SHAPE = Shape(runs=1, blocks=1, shards=(ShardShape(size_bytes=8, lanes=(0,)),), backups=1)
TOLD = Contribution(1.0, 1.0, 1, 1)


def view(generation: int, *names: str) -> View:
    return View(generation=generation, members=tuple(Member(id=name, node=name) for name in names))


def sent(commands: list[p.Command], kind: type[Message]) -> list[p.SendMessage]:
    return [c for c in commands if isinstance(c, p.SendMessage) and isinstance(c.message, kind)]


def first_report(name: str, shape: Shape) -> Report:
    """What a member reports that has nothing yet."""
    (told,) = sent(MemberMachine(me=name, shape=shape).handle(p.Viewed(view=view(1, name, "other"))), Report)
    assert isinstance(told.message, Report)
    return told.message


def has_parameters_of(core: MemberMachine, step: int) -> None:
    """As if they had been published to it."""
    parameters = core.machine.commit.parameters
    parameters.expect(step)
    for shard in parameters.needed():
        parameters.have(shard)


class Pair:
    """`a` is the primary of the only shard and does the only run; `b` is its backup. Both are driven by hand."""

    def __init__(self, shape: Shape = SHAPE) -> None:
        self.a = MemberMachine(me="a", shape=shape)
        self.b = MemberMachine(me="b", shape=shape)
        self.generation = 1
        self.done: dict[str, list[p.Command]] = {"a": [], "b": []}
        self.digests = {"a": 7, "b": 7}
        """What the gradient of a micro-batch comes to on each."""
        self.computes_with = {"a": 5, "b": 5}
        """Digests of the parameters that the two have; what `a` has published with the digest 5."""

        self.keeps = {"a": 9, "b": 9}
        """Digests of the states that the two have."""

    def tell(self, name: str, event: p.Event) -> list[p.Command]:
        """Handle the event, carry out what follows in both members, and say what `name` was told to do."""
        core, other = (self.a, "b") if name == "a" else (self.b, "a")
        commands = core.handle(event)
        self.done[name] += commands
        for command in commands:
            if isinstance(command, p.EditMesh):
                self.generation = max(self.generation, command.view.generation)
            if isinstance(command, p.StoreGradients):
                self.tell(name, p.GradientsKept(step=command.step, shards=command.shards, source=command.source))
            if isinstance(command, p.AskToCommit):
                self.tell(name, p.CommitAllowed())
            if isinstance(command, p.SendMessage):
                self.tell(other, p.Arrived(source=name, generation=self.generation, message=command.message))
            if isinstance(command, p.FinishGradients):
                self.tell(name, p.GradientsFinished(step=command.step, square_norms=dict.fromkeys(command.shards, 4.0)))
            if isinstance(command, p.Recompute) or (isinstance(command, p.Compute) and command.probed):
                check = Check(micro_batch=command.run, loss=0.5, weight=1.0, digests=(self.digests[name],))
                self.tell(name, p.Checked(step=command.step, run=command.run, check=check))
            if isinstance(command, p.Recompute):
                self.tell(name, p.Ready())
            if isinstance(command, p.ComputeDigests) and (command.step < 0 or not command.shards):
                states, published = dict.fromkeys(command.shards, 9), dict.fromkeys(command.published, 5)
                self.tell(name, p.StatesDigested(step=command.step, digests=states, published=published))
            if isinstance(command, p.DigestAgain) and command.asker == name:
                digest = self.computes_with[name] if command.parameters else self.keeps[name]
                looked = {"step": command.step, "shard": command.shard, "asker": name}
                self.tell(name, p.DigestedAgain(**looked, parameters=command.parameters, digest=digest))
            if isinstance(command, p.DigestParameters):
                self.tell(name, p.ParametersDigested(turn=command.turn, digests={0: self.computes_with[name]}))
        return commands

    def start(self, *, ready: bool = True) -> None:
        for name in ("a", "b"):
            self.tell(name, p.Viewed(view=view(1, "a", "b")))
        for name in ("a", "b"):
            self.tell(name, p.Began(step=0, settings="lr", state="s"))
            if ready:
                self.tell(name, p.Ready())

    def one_step(self) -> None:
        self.tell("a", p.BlockDone(step=0, run=0, block=0, contribution=TOLD, touched=1))
        self.tell("a", p.Ready())


def test_two_members_commit_a_step() -> None:
    pair = Pair()
    pair.start()
    assert p.Compute(step=0, run=0, probed=True) in pair.done["a"]
    pair.one_step()
    records = [[c.record for c in pair.done[name] if isinstance(c, p.Passed)] for name in ("a", "b")]
    assert records[0] == records[1]
    assert records[0][0].contribution == TOLD
    assert records[0][0].square_norm == 4.0


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_initial_state_is_digested_as_soon_as_it_is_made(name: str) -> None:
    """Who becomes its primary before the first commit has nothing else to hold it against."""
    pair = Pair()
    pair.start()
    made = next(at for at, command in enumerate(pair.done[name]) if isinstance(command, p.Create))
    assert pair.done[name][made + 1] == p.DigestAgain(step=-1, shard=0, parameters=False, asker=name)


def test_parameters_that_the_script_may_still_read_are_not_overwritten() -> None:
    """A member that has nothing to compute is needed for the commit, but its loop has not yet asked for work."""
    pair = Pair()
    pair.start(ready=False)
    pair.tell("a", p.Ready())
    pair.one_step()
    assert pair.a.record is pair.b.record is None
    pair.tell("b", p.Ready())
    assert pair.a.record == pair.b.record is not None


def doubting() -> tuple[Pair, MemberMachine]:
    """A pair after its first step; the update of `b`, the backup, has come out as 2, that of `a` as 1."""
    pair = Pair()
    pair.start()
    pair.one_step()
    pair.tell("a", p.StatesDigested(step=0, digests={0: 1}, published={0: 6}))
    commands = pair.b.handle(p.AppliedBehind(step=0, shard=0, digest=2))
    assert [c.shard for c in commands if isinstance(c, p.UpdateAgain)] == [0]
    assert not any(isinstance(c, p.Swap | p.Fail) for c in commands)
    return pair, pair.b


def again(digest: int, *, before: int = 9, has_gradient: bool = True) -> p.UpdatedAgain:
    return p.UpdatedAgain(step=0, shard=0, before=before, has_gradient=has_gradient, digest=digest)


def from_a(message: Message) -> p.Arrived:
    return p.Arrived(source="a", generation=1, message=message)


def evidence(digest: int | None, *, step: int = 0, parameters: bool = False) -> DigestReply:
    return DigestReply(step=step, shard=0, parameters=parameters, digest=digest, is_trial=False)


def wishes(commands: list[p.Command]) -> list[str]:
    """Why a member wants the open step begun anew."""
    return [c.reason for c in commands if isinstance(c, p.BeginAnew)]


def ends(commands: list[p.Command]) -> list[str]:
    return [c.kind for c in commands if isinstance(c, p.Fail)]


def test_a_backup_whose_update_is_right_the_second_time_says_so_and_goes_on() -> None:
    _, b = doubting()
    commands = b.handle(again(1))
    assert p.Swap(step=0, shard=0) in commands
    (noticed,) = [c.reason for c in commands if isinstance(c, p.Noticed)]
    assert "shard 0 after step 0 differs between its primary a and its backup b" in noticed
    assert "passing fault" in noticed


def test_a_backup_in_doubt_does_not_acknowledge_and_does_not_vote() -> None:
    _, b = doubting()
    b.handle(again(2))
    b.handle(p.Began(step=1, settings="lr", state="s"))
    gradient = Gradient(step=1, shards=(0,), contribution=TOLD, touched=((1,),), square_norms=(1.0,))
    kept = p.GradientsKept(step=1, shards=(0,), source="a")
    commands = [*b.handle(from_a(gradient)), *b.handle(kept), *b.handle(p.Ready())]
    assert not sent(commands, Ack)
    assert not sent(commands, Vote)


def test_a_backup_whose_state_has_changed_since_it_was_verified_lets_go_of_it_and_begins_the_step_anew() -> None:
    _, b = doubting()
    b.machine.custody.holdings[0].note_digest(8)
    commands = b.handle(again(2, before=9))
    assert 0 not in b.machine.custody.holdings
    (reason,) = wishes(commands)
    assert "what b keeps has changed in its memory since it was verified" in reason
    assert 0 not in b.machine.custody.holdings


def test_a_backup_knows_when_its_initial_state_has_changed() -> None:
    """The first update has nothing before it that was compared with the primary's."""
    _, b = doubting()
    commands = b.handle(again(2, before=8))
    assert 0 not in b.machine.custody.holdings
    assert "what b keeps has changed in its memory" in wishes(commands)[0]


def test_a_backup_whose_gradient_has_changed_since_it_came_lets_go_of_its_state() -> None:
    _, b = doubting()
    commands = b.handle(again(2, has_gradient=False))
    assert 0 not in b.machine.custody.holdings
    assert "the gradient that b keeps has changed in its memory" in wishes(commands)[0]


def test_two_that_differ_without_a_third_have_the_primary_make_the_update_again() -> None:
    _, b = doubting()
    assert [c.to for c in sent(b.handle(again(2)), Doubt)] == ["a"]
    (trial,) = sent(b.handle(from_a(evidence(1))), RepeatUpdate)
    assert trial == p.SendMessage(to="a", message=RepeatUpdate(step=0, shard=0, touched=(1,)))


def tried(made: int | None) -> tuple[MemberMachine, list[p.Command]]:
    """What `b` does when the primary has made `made` of what it was sent."""
    _, b = doubting()
    b.handle(again(2))
    b.handle(from_a(evidence(1)))
    return b, b.handle(from_a(replace(evidence(made), is_trial=True)))


def test_a_primary_that_makes_what_its_backup_has_is_wrong() -> None:
    b, commands = tried(2)
    assert "its own was wrong in its memory" in wishes(commands)[0]
    assert b.machine.custody.repair.wrong == {(0, "a")}
    assert not b.machine.custody.holdings.in_doubt()


def test_a_backup_computes_wrongly_where_the_primary_makes_again_what_it_had() -> None:
    b, commands = tried(1)
    assert "b computes wrongly" in wishes(commands)[0]
    assert 0 not in b.machine.custody.holdings


def test_the_job_ends_where_a_third_result_comes_of_the_trial() -> None:
    b, commands = tried(3)
    assert ends(commands) == ["DivergedError"]
    assert "gets a third result" in str(commands)
    assert b.handle(p.Ready()) == []  # it has ended


def test_the_primary_tells_what_comes_of_a_trial_only_if_it_began_with_what_it_had_told() -> None:
    for before, told in ((9, 2), (8, None)):
        pair, _ = doubting()
        trial = RepeatUpdate(step=0, shard=0, touched=(1,))
        (asked,) = pair.a.handle(p.Arrived(source="b", generation=1, message=trial))
        assert isinstance(asked, p.TryUpdate)
        came = p.UpdateTried(step=0, shard=0, before=before, has_gradient=True, digest=2, asker="b")
        assert [c.message for c in sent(pair.a.handle(came), DigestReply)] == [replace(evidence(told), is_trial=True)]


def test_a_primary_that_has_changed_since_it_told_its_digest_is_wrong() -> None:
    _, b = doubting()
    b.handle(again(2))
    commands = b.handle(from_a(evidence(3)))
    assert "it has changed in the memory of a since then" in wishes(commands)[0]
    assert b.machine.custody.repair.wrong == {(0, "a")}


def begun_anew(pair: Pair) -> list[p.Command]:
    """What `a` does when both have reported in a view in which the open step begins anew."""
    again = replace(view(3, "a", "b"), anew_since=3)
    (said,) = sent(pair.a.handle(p.Viewed(view=again)), Report)
    assert isinstance(said.message, Report)
    assert said.message.wrong == Wrong(parameters=(), accused=())
    (theirs,) = sent(pair.b.handle(p.Viewed(view=again)), Report)
    return pair.a.handle(p.Arrived(source="b", generation=3, message=theirs.message))


def test_who_was_at_fault_twice_stays_until_the_step_is_committed_since_only_then_all_know_of_it() -> None:
    pair, _ = doubting()
    repair = pair.a.machine.custody.repair
    repair.own_fault("once")
    repair.own_fault("twice")
    pair.a.machine.out.take()
    commands = begun_anew(pair)
    assert p.VoidAttempt(step=1) in commands
    assert not ends(commands)
    repair.begin(1)
    repair.depart(spoils=False)
    assert ends(pair.a.machine.out.take()) == ["CorruptedError"]


def test_who_was_at_fault_twice_stays_until_it_has_compared_what_it_backs_up() -> None:
    """Its primary may have a wrong state of the step, and nobody else could tell."""
    pair = Pair()
    pair.start()
    pair.one_step()
    repair = pair.b.machine.custody.repair
    repair._faults += ["once", "twice"]
    repair.depart(spoils=False)
    assert not ends(pair.b.machine.out.take())
    pair.tell("a", p.StatesDigested(step=0, digests={0: 1}, published={0: 6}))
    commands = pair.b.handle(p.AppliedBehind(step=0, shard=0, digest=1))
    assert ends(commands) == ["CorruptedError"]


def test_a_sum_that_changes_while_it_waits_for_other_lanes_begins_the_step_anew() -> None:
    """Without a new attempt nobody would finish the gradient, and all would wait."""
    pair = Pair()
    pair.start()
    damaged = p.GradientsFinished(step=0, square_norms={0: 4.0}, damaged=(0,))
    (reason,) = wishes(pair.a.handle(damaged))
    assert reason == "the sum of gradients for shard 0 of step 0 came to a changed"


def test_who_alone_has_a_state_stays_however_often_it_was_at_fault() -> None:
    pair, _ = doubting()
    repair = pair.a.machine.custody.repair
    repair._faults += ["once", "twice"]
    pair.a.machine.commit.roles.set_live((Holders("a"),))
    repair.depart(spoils=False)
    assert not ends(pair.a.machine.out.take())


def test_a_step_that_is_begun_anew_again_and_again_ends_the_job() -> None:
    pair, _ = doubting()
    repair = pair.a.machine.custody.repair
    for _ in range(TRIES_MAX + 1):
        repair.is_new = False
        repair.begin_anew("the same again")
    assert ends(pair.a.machine.out.take()) == ["DivergedError"]


def test_who_computes_with_other_parameters_is_at_fault_unless_their_publisher_was_wrong() -> None:
    pair, _ = doubting()
    repair = pair.b.machine.custody.repair
    repair.came_wrong(0, "other parameters")
    repair.begin(1)
    assert repair._faults == ["other parameters"]


def test_who_knows_of_something_wrong_does_not_vote_before_the_step_has_begun_anew() -> None:
    pair = Pair()
    pair.start()
    pair.a.machine.custody.repair.begin_anew("something")
    pair.one_step()
    assert not sent(pair.done["a"], Vote)


@pytest.mark.parametrize("keeps", [9, 4])
def test_a_backup_whose_state_has_changed_does_not_become_the_primary(keeps: int) -> None:
    """What it took over with would be copied to others as if it had been verified."""
    pair = Pair()
    pair.start()
    pair.keeps["b"] = keeps
    pair.tell("b", p.Viewed(view=view(2, "b")))
    anew = [c.reason for c in pair.done["b"] if isinstance(c, p.BeginAnew)]
    if keeps == 9:
        assert not anew
    else:
        assert "what b has of shard 0 after step -1 has changed in its memory" in anew[0]
        assert 0 not in pair.b.machine.custody.holdings


@pytest.mark.parametrize(("before", "has_gradient", "wrong"), [(8, True, False), (7, True, True), (8, False, True)])
def test_who_takes_over_with_an_update_to_be_made_looks_at_what_it_is_made_from(
    before: int, has_gradient: bool, wrong: bool
) -> None:
    made = {"shard": 3, "step": 5, "member": "b", "verified": 8}
    said = look_before_taking_over(**made, verified_now=before, has_gradient=has_gradient)
    assert bool(said) is wrong
    assert not look_before_taking_over(**(made | {"verified": None}), verified_now=before, has_gradient=True)


def test_a_primary_answers_a_doubt_with_what_it_has_now() -> None:
    pair, _ = doubting()
    doubt = p.Arrived(source="b", generation=1, message=Doubt(step=0, shard=0, parameters=False))
    assert pair.a.handle(doubt) == [p.DigestAgain(step=0, shard=0, parameters=False, asker="b")]
    commands = pair.a.handle(p.DigestedAgain(step=0, shard=0, parameters=False, asker="b", digest=4))
    assert [c.message for c in sent(commands, DigestReply)] == [evidence(4)]
    assert "has changed in its memory since it was told" in wishes(commands)[0], "it had told 1"


def test_a_copy_of_this_very_step_is_no_witness() -> None:
    """It is as its primary's state was, right or wrong."""
    pair, _ = doubting()
    pair.a.machine.custody.holdings[0].replace(0, digest=1)
    doubt = p.Arrived(source="b", generation=1, message=Doubt(step=0, shard=0, parameters=False))
    assert [c.message for c in sent(pair.a.handle(doubt), DigestReply)] == [evidence(None)]


def test_a_doubt_that_is_open_when_the_primary_dies_ends_the_job() -> None:
    _, b = doubting()
    b.handle(again(2))
    commands = b.handle(p.Viewed(view=view(2, "b")))
    assert ends(commands)[0] == "DivergedError"
    assert "a was lost before it was known which of the two is wrong" in str(commands)


@pytest.mark.parametrize("wrong", ["a", "b"])
def test_nobody_votes_before_what_it_has_computed_with_is_known_to_be_right(wrong: str) -> None:
    pair = Pair()
    pair.computes_with[wrong] = 7
    pair.start()
    pair.one_step()
    assert not [c for c in pair.done["b"] if isinstance(c, p.Passed)]
    commands = pair.done[wrong]
    if wrong == "b":  # it asks the publisher, who still has them
        assert [c.to for c in sent(commands, Doubt)] == ["a"]
        commands = pair.b.handle(from_a(evidence(5, step=-1, parameters=True)))
    assert ("b computes with other parameters" if wrong == "b" else "in the memory of a") in wishes(commands)[0]


def test_a_verified_backup_acknowledges_the_next_gradient_that_waits() -> None:
    pair = Pair()
    pair.start()
    pair.one_step()
    gradient = Gradient(step=1, shards=(0,), contribution=TOLD, touched=((1,),), square_norms=(1.0,))
    assert not sent(pair.b.handle(p.Arrived(source="a", generation=1, message=gradient)), Ack)
    assert not sent(pair.b.handle(p.GradientsKept(step=1, shards=(0,), source="a")), Ack)
    pair.b.handle(p.AppliedBehind(step=0, shard=0, digest=7))
    commands = pair.b.handle(
        p.Arrived(source="a", generation=1, message=Digests(step=0, digests=((0, 7),), parameters=()))
    )
    assert p.Swap(step=0, shard=0) in commands
    assert [c.message for c in sent(commands, Ack)] == [Ack(step=1, shards=(0,))]


@pytest.mark.parametrize("is_damaged", [True, False])
def test_a_backup_acknowledges_no_gradient_before_it_has_found_it_intact(is_damaged: bool) -> None:
    """Else the step is committed with what both have, and the third, which has it right, is taken for wrong."""
    pair = Pair()
    pair.start()
    pair.one_step()
    pair.b.handle(p.AppliedBehind(step=0, shard=0, digest=7))
    pair.b.handle(p.Arrived(source="a", generation=1, message=Digests(step=0, digests=((0, 7),), parameters=())))
    gradient = Gradient(step=1, shards=(0,), contribution=TOLD, touched=((1,),), square_norms=(1.0,))
    commands = pair.b.handle(p.Arrived(source="a", generation=1, message=gradient))
    assert any(isinstance(command, p.StoreGradients) for command in commands) and not sent(commands, Ack)
    looked = {"damaged": (0,)} if is_damaged else {"shards": (0,)}
    commands = pair.b.handle(p.GradientsKept(step=1, source="a", **looked))
    assert [c.message for c in sent(commands, Ack)] == ([] if is_damaged else [Ack(step=1, shards=(0,))])
    assert bool(wishes(commands)) == is_damaged
    assert (1 in pair.b.machine.custody.holdings[0].kept) != is_damaged


def test_a_removed_member_leaves() -> None:
    pair = Pair()
    pair.start()
    assert pair.b.handle(p.Viewed(view=view(2, "a"))) == [p.Leave(evicted=True)]


def test_a_newcomer_ignores_views_before_its_own() -> None:
    newcomer = MemberMachine(me="n", shape=SHAPE)
    assert newcomer.handle(p.Viewed(view=view(1, "a"))) == []
    commands = newcomer.handle(p.Viewed(view=view(2, "a", "n")))
    assert [c.to for c in sent(commands, Report)] == ["a"]


def test_a_view_that_is_known_or_older_changes_nothing() -> None:
    pair = Pair()
    pair.start()
    assert pair.a.handle(p.Viewed(view=view(1, "a"))) == []


def test_a_newcomer_waits_for_reports_however_long_the_others_step_takes_and_they_do_not_wait_for_its() -> None:
    newcomer, member = MemberMachine(me="c", shape=SHAPE), Pair()
    newcomer.handle(p.Viewed(view=view(2, "a", "b", "c")))
    assert newcomer.machine.views.is_recovering
    assert newcomer.unreported() == (), "the others may not have committed yet"
    member.start()
    member.one_step()
    member.tell("b", p.Viewed(view=view(2, "b", "c")))
    assert member.b.unreported() == ("c",), "who comes in answers at once"


def test_in_the_first_view_everybody_owes_a_report() -> None:
    first = MemberMachine(me="c", shape=SHAPE)
    first.handle(p.Viewed(view=view(1, "a", "b", "c")))
    assert first.unreported() == ("a", "b")


def test_a_frame_of_a_newer_generation_is_held_and_makes_it_read_the_view() -> None:
    pair = Pair()
    pair.start()
    commands = pair.a.handle(p.Arrived(source="b", generation=3, message=EndsBefore(step=0)))
    assert commands == [p.ReadView(generation=3)]


def test_a_frame_of_an_older_generation_is_void() -> None:
    core = MemberMachine(me="a", shape=SHAPE)
    core.handle(p.Viewed(view=view(4, "a", "b")))
    old = Vote(
        step=0,
        seen=3,
        contribution=TOLD,
        square_norms=(),
        roles=(),
        settings="",
        checks=(),
        before=(),
        checkpoint=CheckpointVote(),
        graph="",
        plan=None,
    )
    assert core.handle(p.Arrived(source="b", generation=3, message=old)) == []
    assert core.machine.step.ballot.votes(["b"]) is None


def test_what_belongs_to_a_step_that_is_over_is_ignored() -> None:
    pair = Pair()
    pair.start()
    pair.one_step()
    stale: list[Message] = [
        Partial(step=0, block=0, node=(0, 1), contribution=TOLD, touched=1, lanes=((0, 0),)),
        Gradient(step=0, shards=(0,), contribution=TOLD, touched=((1,),), square_norms=(1.0,)),
        Ack(step=0, shards=(0,)),
        Vote(
            step=0,
            seen=1,
            contribution=TOLD,
            square_norms=(),
            roles=(),
            settings="",
            checks=(),
            before=(),
            checkpoint=CheckpointVote(),
            graph="",
            plan=None,
        ),
        Copied(step=0, shard=0, intact=True),
    ]
    for message in stale:
        assert pair.b.handle(p.Arrived(source="a", generation=1, message=message)) == []
    events: list[p.Event] = [
        p.BlockDone(step=0, run=0, block=0, contribution=TOLD, touched=1),
        p.GradientsFinished(step=0, square_norms={0: 1.0}),
        p.StatesDigested(step=7, digests={0: 1}, published={}),
        p.TookCopy(step=7, shard=0, intact=True, source="b", told=1),
        p.AppliedBehind(step=7, shard=0, digest=1),
    ]
    for event in events:
        assert not any(isinstance(c, p.SendMessage) for c in pair.b.handle(event))


def test_a_damaged_copy_is_sent_once_more() -> None:
    pair = Pair()
    pair.start()
    pair.a.machine.custody.given._under_way[0, "b"] = 1
    broken = p.Arrived(source="b", generation=1, message=Copied(step=-1, shard=0, intact=False))
    assert [c.message for c in sent(pair.a.handle(broken), ShardCopy)] == [ShardCopy(step=-1, shard=0, digest=9)]


@pytest.mark.parametrize(("now", "who"), [(1, "b is wrong"), (3, "has changed in the memory of a")])
def test_a_copy_that_is_damaged_twice_tells_who_is_wrong(now: int, who: str) -> None:
    """The receiver, where the sender still has what it told; else the sender."""
    pair = Pair()
    pair.start()
    broken = p.TookCopy(step=-1, shard=0, intact=False, source="a", told=1)
    assert [c.message for c in sent(pair.b.handle(broken), Copied)] == [Copied(step=-1, shard=0, intact=False)]
    assert [c.to for c in sent(pair.b.handle(broken), Doubt)] == ["a"]
    commands = pair.b.handle(from_a(evidence(now, step=-1)))
    assert who in wishes(commands)[0]


def test_a_copy_without_room_is_refused_and_the_sender_waits_no_longer() -> None:
    pair = Pair()
    pair.start()
    noticed = pair.b.handle(p.CopyBudgetSet(parameters_bytes=8, refused=frozenset([0])))
    assert ["no room for copies of 1 shards" in c.reason for c in noticed if isinstance(c, p.Noticed)] == [True]
    pair.b.machine.custody.holdings.drop(0)
    commands = pair.b.handle(p.Arrived(source="a", generation=1, message=ShardCopy(step=-1, shard=0, digest=None)))
    assert not any(isinstance(c, p.TakeCopy) for c in commands)
    (answer,) = [c.message for c in sent(commands, Copied)]
    assert answer == Copied(step=-1, shard=0, intact=True, refused=(0,))
    given = pair.a.machine.custody.given
    given._under_way[0, "b"] = 1
    pair.a.handle(p.Arrived(source="b", generation=1, message=answer))
    assert not given.is_reading()
    # Once it has room, it takes the copy.
    pair.b.handle(p.CopyBudgetSet(parameters_bytes=8))
    pair.b.machine.custody.holdings.drop(0)
    commands = pair.b.handle(p.Arrived(source="a", generation=1, message=ShardCopy(step=-1, shard=0, digest=None)))
    assert any(isinstance(c, p.TakeCopy) for c in commands)


def test_a_copy_of_the_committed_step_is_taken_and_answered() -> None:
    pair = Pair()
    pair.start()
    commands = pair.b.handle(p.Arrived(source="a", generation=1, message=ShardCopy(step=-1, shard=0, digest=None)))
    assert any(isinstance(c, p.TakeCopy) for c in commands)
    answer = sent(pair.b.handle(p.TookCopy(step=-1, shard=0, intact=True, source="a", told=1)), Copied)
    assert [c.message for c in answer] == [Copied(step=-1, shard=0, intact=True)]


def test_different_hyperparameters_end_the_job() -> None:
    pair = Pair()
    for name in ("a", "b"):
        pair.tell(name, p.Viewed(view=view(1, "a", "b")))
    pair.tell("a", p.Began(step=0, settings='{"hyperparameters": 1}', state=""))
    pair.tell("b", p.Began(step=0, settings='{"hyperparameters": 2}', state=""))
    pair.tell("b", p.Ready())
    pair.tell("a", p.Ready())
    pair.one_step()
    assert [c.kind for c in pair.done["a"] if isinstance(c, p.Fail)] == ["DivergedError"]


def test_members_that_are_done_wait_for_each_other_and_leave() -> None:
    pair = Pair()
    pair.start(ready=False)
    pair.tell("a", p.LoopEnded(step=0))
    assert p.Leave() not in pair.done["a"]
    pair.tell("b", p.LoopEnded(step=0))
    assert p.Leave() in pair.done["a"] and p.Leave() in pair.done["b"]


@pytest.mark.parametrize("first", ["leaves", "asks"])
def test_a_member_that_leaves_its_loop_alone_is_told_at_once_that_others_go_on(first: str) -> None:
    """Of two, the lower rank decides."""
    pair = Pair()
    pair.start(ready=False)
    events = [("b", p.LoopEnded(step=0)), ("a", p.Ready())]
    for name, event in events if first == "leaves" else reversed(events):
        pair.tell(name, event)
    failures = [command for command in pair.done["b"] if isinstance(command, p.Fail)]
    assert [failure.kind for failure in failures] == ["StoppedError"]
    assert "left here before step 0, but a went on" in failures[0].reason
    assert not [command for command in pair.done["a"] if isinstance(command, p.Fail)]


@pytest.mark.parametrize("first", ["leaves", "asks"])
def test_a_member_that_would_go_on_alone_ends_with_those_who_have_left(first: str) -> None:
    pair = Pair()
    pair.start(ready=False)
    events = [("a", p.LoopEnded(step=0)), ("b", p.Ready())]
    for name, event in events if first == "leaves" else reversed(events):
        pair.tell(name, event)
    assert p.Leave() in pair.done["a"]
    assert p.Leave(overruled=True) in pair.done["b"]
    assert not [command for done in pair.done.values() for command in done if isinstance(command, p.Fail)]


@pytest.mark.parametrize(
    ("left", "going", "ends"),
    [
        ("", "abc", False),
        ("ab", "", True),  # whatever the third will do
        ("b", "", None),
        ("b", "c", None),
        ("c", "ab", False),
        ("abc", "", True),
    ],
)
def test_more_than_half_of_the_members_decide_whether_the_job_ends(left: str, going: str, ends: bool | None) -> None:
    assert job_ends("abc", left, going) is ends


def test_of_two_halves_the_one_with_the_lowest_rank_decides() -> None:
    assert job_ends("abcd", "bc", "a") is None
    assert job_ends("abcd", "bc", "ad") is False
    assert job_ends("abcd", "ad", "bc") is True


def test_when_one_has_left_in_peace_the_others_do_not_wait() -> None:
    pair = Pair()
    pair.start()
    assert pair.a.handle(p.JobEnded()) == [p.Leave()]


def test_a_loss_while_all_are_finishing_needs_no_state() -> None:
    pair = Pair()
    pair.start()
    pair.one_step()
    has_parameters_of(pair.b, 0)
    pair.b.handle(p.Began(step=1, settings="lr", state="s"))
    pair.b.handle(p.LoopEnded(step=1))
    assert p.Leave() in pair.b.handle(p.Viewed(view=view(2, "b")))


def test_lost_state_is_said_not_invented() -> None:
    pair = Pair()
    pair.start()
    pair.one_step()
    pair.b.machine.custody.holdings._held.clear()
    commands = pair.b.handle(p.Viewed(view=view(2, "b")))
    failures = [c for c in commands if isinstance(c, p.Fail)]
    assert [failure.kind for failure in failures] == ["StateLostError"]
    assert "all holders of shard 0 are gone (a, b)" in failures[0].reason


def test_runs_that_end_during_a_recovery_count_afterwards() -> None:
    pair = Pair()
    pair.start()
    pair.a.handle(p.Viewed(view=view(2, "a", "c")))
    pair.a.handle(p.BlockDone(step=0, run=0, block=0, contribution=TOLD, touched=1))
    assert pair.a.machine.step.runs.own[0].nodes == frozenset()
    report = first_report("c", SHAPE)
    commands = pair.a.handle(p.Arrived(source="c", generation=2, message=replace(report, begun=-1)))
    assert any(isinstance(c, p.Resumed) for c in commands)
    assert any(isinstance(c, p.Keep) for c in commands)


def test_a_finished_shard_reads_no_more_partials_since_their_owner_may_let_go_of_them() -> None:
    """A backup that has become primary goes on from the finished gradient that it keeps: no one waits for it."""
    pair = Pair(replace(SHAPE, runs=2))
    views = view(1, "a", "b")
    pair.tell("a", p.Viewed(view=views))
    pair.tell("b", p.Viewed(view=views))
    late = Partial(step=0, block=0, node=(1, 2), contribution=TOLD, touched=1, lanes=((0, 0),))
    arrived = p.Arrived(source="b", generation=1, message=late)
    before = pair.a.machine.step.reduction.finished
    before[0] = FinishedGradient(TOLD, (1,), 4.0)
    assert not [c for c in pair.a.handle(arrived) if isinstance(c, p.Keep)]
    del before[0]
    assert [c for c in pair.a.handle(arrived) if isinstance(c, p.Keep)], "before that, it reads them"
