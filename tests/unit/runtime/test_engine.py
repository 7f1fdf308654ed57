"""The engine with a fake mesh, executor and core: what goes to whom, in which order, and what ends it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastrain import protocol as p
from elastrain.comm.errors import MemberLost
from elastrain.comm.wire.addresses import Frame, LossCause, PeerLost
from elastrain.errors import NoRoomError, RefusedError, StateLostError, StoppedError
from elastrain.job.placement import Holders
from elastrain.job.values import Contribution, Record, Recovery, Report, Shape, ShardShape
from elastrain.job.world import Member, View
from elastrain.member.member_machine import MemberMachine
from elastrain.memory.pipeline_memory import Load
from elastrain.protocol import agent_messages as am
from elastrain.protocol.messages import EndsBefore, LoopHandover, encode
from elastrain.runtime.carrying.tensor_memory import TensorMemory
from elastrain.runtime.engine.engine import Engine, EngineParts
from elastrain.runtime.engine.pacing import (
    BETWEEN_STEPS_MOST_S,
    BETWEEN_STEPS_S,
    BETWEEN_STEPS_SHARE,
    RECOVERY_DEADLINE_S,
)
from elastrain.runtime.faults.armed import ArmedFaults
from elastrain.runtime.io.agent_link import AgentLink, ChannelClosedError
from elastrain.runtime.io.journal import Journal
from elastrain.runtime.io.loop_channel import Assignment, LoopChannel, LoopOver, StepBegun, TryAgain

VIEW = View(generation=2, members=(Member(id="m0", node="a"), Member(id="m1", node="b")), reason="m2 was lost")
RECORD = Record(
    step=3,
    generation=2,
    contribution=Contribution(loss=6.0, weight=4.0, samples=4),
    square_norm=1.0,
    skipped=False,
    switch=False,
)
BLOCK_DONE = p.BlockDone(step=0, run=0, block=0, contribution=Contribution(), touched=0)


class FakeMesh:
    """Brings what the test puts into `coming`."""

    address = "unix:m0"

    def __init__(self) -> None:
        self.coming: deque[Frame | PeerLost] = deque()
        self.sent: list[tuple[str, list[Any]]] = []
        self.edited: list[int] = []
        self.renewed: list[int] = []
        self.waited_s: list[float] = []
        self.lost: set[str] = set()
        self.closed = False
        self.others_went_on = False
        self.links = SimpleNamespace(may_be_torn=lambda: self.others_went_on, take_rates=dict, busy=frozenset)

    def poll(self, wait_s: float) -> Iterator[Frame | PeerLost]:
        self.waited_s.append(wait_s)
        while self.coming:
            yield self.coming.popleft()

    def send(self, member: str, kind: int, body: bytes, tensors: list[Any]) -> None:
        if member in self.lost:
            raise MemberLost(member, "it is gone")
        self.sent.append((member, tensors))

    def edit(self, generation: int, members: list[Any], *, links: str, renew: bool) -> None:
        self.edited.append(generation)
        self.renewed += [generation] if renew else []

    def watch(self, fd: int, callback: Callable[[], None]) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeExecutor:
    """Keeps what it is asked for; slots are names."""

    done: list[str]
    hyper: dict[int, Any] = field(default_factory=dict)
    behind: list[str] = field(default_factory=list)
    results: list[p.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.books = self.slots = self
        self.memory = TensorMemory(torch.empty)  # the host's

    @property
    def has_work_behind(self) -> bool:
        return bool(self.behind)

    def start_run(self) -> str:
        return "slot"

    def start_check(self) -> None: ...

    def begin_step(self, step: int, hyper: Any, loop_payload: Any) -> None:
        self.hyper[step] = hyper

    def resumed(self) -> None:
        pass

    def is_checkpoint_due(self, view: Any, now_s: float) -> bool:
        return False

    def check_slot(self) -> str:
        return "slot of a check"

    def change(self) -> str:
        return "another slot"

    def block_done(self, event: p.BlockDone) -> None:
        self.done.append("executor notes the block")

    def end_run(self) -> None:
        self.done.append("executor ends the run")

    def check_is_over(self) -> None: ...

    def work_behind(self) -> list[p.Event]:
        self.behind.pop()
        results, self.results = self.results, []
        return results

    def carry_out(self, command: p.Command) -> p.Event | None:
        self.done.append(f"executor {type(command).__name__}")
        return None

    def payload(self, message: object) -> list[str]:
        return ["the executor's tensors"]


@dataclass
class ScriptedCore:
    """Answers each kind of event with the commands that the test has written down."""

    done: list[str]
    answers: dict[type, list[p.Command]] = field(default_factory=dict)
    copying: Any = field(
        default_factory=lambda: SimpleNamespace(takers=frozenset(), sent_bytes=0, short={}, without_room=())
    )
    events: list[p.Event] = field(default_factory=list)
    holders: tuple[Holders, ...] = (Holders("m0", ("m1",)),)
    record: Record | None = None
    step: int = 0
    elsewhere: dict[int, frozenset[str]] | None = field(default_factory=lambda: {0: frozenset({"m1"})})
    shape: Shape = field(default_factory=lambda: Shape(runs=2, blocks=1, shards=(), backups=1))
    silent: tuple[str, ...] = ()
    reason: str = ""

    def why_not_yet(self) -> str:
        return self.reason

    @property
    def machine(self) -> Any:
        tasks = SimpleNamespace(load=lambda: None)
        return SimpleNamespace(
            shape=self.shape,
            step=SimpleNamespace(tasks=tasks),
            commit=SimpleNamespace(roles=SimpleNamespace(live=(), target=())),
            held_elsewhere=lambda: self.elsewhere,
        )

    def handle(self, event: p.Event) -> list[p.Command]:
        self.events.append(event)
        self.done.append(f"core {type(event).__name__}")
        return self.answers.get(type(event), [])

    def unreported(self) -> tuple[str, ...]:
        return self.silent


class FakeChannel:
    """The launcher's end: what is said to it, and what it says next."""

    def __init__(self) -> None:
        self.told: list[am.FromWorker] = []
        self.says: list[am.ToWorker] = []
        self.is_gone = False

    def send(self, message: am.FromWorker, *, fd: int | None = None) -> None:
        self.told.append(message)

    def receive(self) -> list[am.ToWorker]:
        if self.is_gone:
            raise ChannelClosedError("the agent has closed the channel")
        says, self.says = self.says, []
        return says

    def fileno(self) -> int:
        return 0


class FakeMemory:
    def __init__(self) -> None:
        self.plans: list[tuple[p.Resumed, Shape]] = []

    def resumed(self, plan: p.Resumed, shape: Shape, load: Load | None) -> p.CopyBudgetSet:
        self.plans.append((plan, shape))
        return p.CopyBudgetSet(parameters_bytes=123, has_room_for_all=False)

    def passed(self, record: Record, placements: object) -> None:
        raise NoRoomError("12 MiB are missing")


class NotedFaults(ArmedFaults):
    """Notes the places that faults could be aimed at."""

    def __init__(self) -> None:
        super().__init__(Journal(None, "m0"), lambda number: None)
        self.reached: list[tuple[int, str]] = []

    def reach(self, step: int, phase: str) -> None:
        self.reached.append((step, phase))


class Bench:
    """An engine among fakes; `turn` is what its thread does again and again."""

    def __init__(
        self, *, alone: bool = False, memory: FakeMemory | None = None, core: MemberMachine | None = None
    ) -> None:
        self.now_s = 100.0
        self.done: list[str] = []
        self.mesh, self.executor = FakeMesh(), FakeExecutor(self.done)
        self.core, self.channel = ScriptedCore(self.done), FakeChannel()
        self.agent = AgentLink("m0", None if alone else self.channel)  # type: ignore[arg-type]
        self.handover = LoopChannel(self.mesh.wake)
        self.reported: list[Exception] = []
        self.reported_by: list[str] = []
        self.faults = NotedFaults()
        parts = EngineParts(
            mesh=self.mesh,  # type: ignore[arg-type]
            beacon=SimpleNamespace(fd=7),  # type: ignore[arg-type]
            agent=self.agent,
            executor=self.executor,  # type: ignore[arg-type]
            handover=self.handover,
            faults=self.faults,
            journal=Journal(None, "m0"),
            memory=memory,  # type: ignore[arg-type]
            report=self._report,
            trail=SimpleNamespace(move=lambda place, **more: None, beat=lambda: None),  # type: ignore[arg-type]
            clock=lambda: self.now_s,
        )
        self.engine = Engine(core or self.core, parts)  # type: ignore[arg-type]

    def _report(self, error: Exception) -> None:
        self.reported.append(error)
        self.reported_by.append(threading.current_thread().name)

    def turn(self, *says: am.ToWorker) -> None:
        if says:
            self.channel.says += says
            self.agent.note_readable()
        self.engine.turn()

    def happens(self, event: p.Event, *commands: p.Command) -> None:
        """The loop tells an event, to which the core answers with these commands."""
        self.core.answers[type(event)] = list(commands)
        self.handover.tell(event)
        self.turn()


def test_what_the_mesh_the_agent_and_the_loop_bring_reaches_the_core_in_this_order() -> None:
    bench = Bench()
    kind, body = encode(EndsBefore(step=4))
    bench.mesh.coming.append(Frame(source="m1", generation=2, kind=kind, body=body, tensors=()))
    bench.handover.tell(p.Ready())
    bench.turn(am.NewView(view=VIEW), am.EndReached())
    arrived = p.Arrived(source="m1", generation=2, message=EndsBefore(step=4), payload=())
    assert bench.core.events == [arrived, p.Viewed(view=VIEW), p.JobEnded(), p.Ready()]


def test_the_core_sees_an_event_before_the_executor_does() -> None:
    bench = Bench()
    bench.happens(BLOCK_DONE, p.CombineOwn(step=0, block=0, combine=None))  # type: ignore[arg-type]
    bench.handover.tell(p.Ready())
    bench.turn()
    assert bench.done == [
        "core BlockDone",
        "executor notes the block",
        "executor CombineOwn",
        "core Ready",
        "executor ends the run",
    ]


def test_what_a_step_begins_with_is_taken_over_in_the_engines_turn() -> None:
    bench = Bench()
    began = p.Began(step=2, settings="{}", state="{}")
    handover = LoopHandover(step=2, state="{}")
    bench.core.answers[p.Began] = [p.SendMessage(to="m1", message=handover)]
    bench.handover.tell(StepBegun(event=began, hyper=[{"lr": 0.1}], payload=lambda: ["state"]))  # type: ignore[list-item]
    assert bench.executor.hyper == {}, "the main thread writes nothing"
    bench.turn()
    assert bench.executor.hyper == {2: [{"lr": 0.1}]}
    assert bench.core.events == [began]
    assert bench.mesh.sent == [("m1", ["state"])]


def test_runs_checks_and_second_tries_come_with_their_slots() -> None:
    bench = Bench()
    compute, recompute = p.Compute(step=0, run=1), p.Recompute(step=0, run=0)
    bench.happens(p.Ready(), compute)
    bench.happens(p.Ready(), recompute)
    bench.handover.tell(TryAgain(compute))
    bench.turn()
    outcomes = [bench.handover.wait() for _ in range(3)]
    assert outcomes == [
        Assignment(compute, "slot"),  # type: ignore[arg-type]
        Assignment(recompute, "slot of a check"),  # type: ignore[arg-type]
        Assignment(compute, "another slot"),  # type: ignore[arg-type]
    ]


def test_the_end_of_the_loop_carries_the_last_record() -> None:
    bench = Bench()
    bench.core.record = RECORD
    bench.happens(p.LoopEnded(step=4), p.Leave(overruled=True))
    assert bench.handover.wait() == LoopOver(overruled=True, last=RECORD)


def test_who_is_removed_is_stopped_and_the_reason_is_told() -> None:
    bench = Bench()
    bench.happens(p.Ready(), p.Leave(evicted=True))
    with pytest.raises(StoppedError, match="m0 was removed from the job: start it again"):
        bench.handover.wait()
    assert [str(error) for error in bench.reported] == [
        "member m0 was removed from the job: start it again to join anew"
    ]


def advance(step: int) -> p.Advance:
    return p.Advance(record=SimpleNamespace(step=step))  # type: ignore[arg-type]


def test_whose_node_leaves_is_stopped_when_its_step_is_committed_and_not_before() -> None:
    bench = Bench()
    bench.happens(p.Ready(), advance(3))
    assert bench.handover.wait() == advance(3)
    bench.turn(am.Drain())
    assert not bench.reported
    bench.happens(p.Ready(), advance(4))
    with pytest.raises(StoppedError, match="m0 has handed over after step 4"):
        bench.handover.wait()


def test_whose_node_leaves_goes_on_until_others_know_that_they_have_all() -> None:
    bench = Bench()
    bench.turn(am.Drain())
    m1, m2, nobody = frozenset({"m1"}), frozenset({"m2"}), frozenset[str]()
    commits = [{0: nobody}, {0: m1}, {0: m2}, None, {0: m2}, {0: m2, 1: m1}, {0: nobody, 1: m1}, {0: m1 | m2, 1: m1}]
    for step, elsewhere in enumerate(commits):
        bench.core.elsewhere = elsewhere
        bench.happens(p.Ready(), advance(step))
        assert bench.handover.wait() == advance(step)
    bench.happens(p.Ready(), advance(8))
    with pytest.raises(StoppedError, match="m0 has handed over after step 8"):
        bench.handover.wait()


def test_a_send_to_who_is_gone_is_no_error() -> None:
    bench = Bench()
    bench.mesh.lost.add("m1")
    bench.happens(
        p.Ready(),
        p.SendMessage(to="m1", message=EndsBefore(step=1)),
        p.SendMessage(to="m2", message=EndsBefore(step=1)),
    )
    assert bench.mesh.sent == [("m2", ["the executor's tensors"])]


def test_a_lost_peer_is_told_to_the_agent_and_a_dead_one_as_proof() -> None:
    bench = Bench()
    for cause in (LossCause.DEAD, LossCause.BROKEN):
        bench.mesh.coming.append(PeerLost(member="m1", cause=cause, reason="gone", at_s=1.0))
    bench.turn()
    assert bench.channel.told == [
        am.Suspect(member="m1", reason="gone", dead=True),
        am.Suspect(member="m1", reason="gone", link_lost=True),
    ]


@pytest.mark.parametrize(
    ("message", "error"),
    [(am.Refused(reason="seed: 0 here, 1 there"), RefusedError), (am.Stop(reason="stopped by SIGTERM"), StoppedError)],
)
def test_the_agents_word_ends_the_turn_and_not_the_meshs_poll(
    message: am.Refused | am.Stop, error: type[Exception]
) -> None:
    bench = Bench()
    kind, body = encode(EndsBefore(step=4))
    bench.mesh.coming.append(Frame(source="m1", generation=2, kind=kind, body=body, tensors=()))
    with pytest.raises(error, match=message.reason.split(":")[0]):
        bench.turn(message)
    assert [type(event) for event in bench.core.events] == [p.Arrived], "what had come was taken in first"


def test_a_launcher_that_is_gone_stops_the_member() -> None:
    bench = Bench()
    bench.channel.is_gone = True
    bench.agent.note_readable()
    with pytest.raises(StoppedError, match="the launcher is gone"):
        bench.engine.turn()


def test_a_view_is_taken_over_by_the_mesh_and_a_silent_recovery_is_told_once_per_deadline() -> None:
    bench = Bench()
    bench.core.answers[p.Viewed] = [p.EditMesh(view=VIEW, step=0)]
    bench.core.silent = ("m1",)
    bench.turn(am.NewView(view=VIEW))
    assert (bench.mesh.edited, bench.engine.view) == ([2], VIEW)
    bench.now_s += RECOVERY_DEADLINE_S
    bench.turn()
    bench.turn()
    assert bench.channel.told == [am.Suspect(member="m1", reason="no report for generation 2 in 10 s", generation=2)]


def a_report_of(core: MemberMachine, view: View) -> Frame:
    """What the member tells m0 when it goes on to the view."""
    told = [c for c in core.handle(p.Viewed(view=view)) if isinstance(c, p.SendMessage) and c.to == "m0"]
    (report,) = [each.message for each in told if isinstance(each.message, Report)]
    kind, body = encode(report)
    return Frame(source="m1", generation=view.generation, kind=kind, body=body, tensors=())


@pytest.mark.parametrize("report_comes_first", [False, True])
def test_faults_meet_the_phases_of_a_recovery_in_their_order_also_where_they_come_together(
    *, report_comes_first: bool
) -> None:
    shape = Shape(runs=2, blocks=1, shards=(ShardShape(size_bytes=8, lanes=(0,)),), backups=1)
    bench = Bench(core=MemberMachine(me="m0", shape=shape))
    other = MemberMachine(me="m1", shape=shape)
    for view in (replace(VIEW, generation=1, members=(*VIEW.members, Member(id="m2", node="b"))), VIEW):
        assert bench.faults.reached == [], "nothing is recovered in the first view"
        frame = a_report_of(other, view)
        if report_comes_first:
            bench.mesh.coming.append(frame)
            bench.turn()
        bench.turn(am.NewView(view=view))
        if not report_comes_first:
            bench.mesh.coming.append(frame)
            bench.turn()
    recovered = [(0, "quiesce"), (0, "report"), (0, "decide"), (-1, "publish"), (0, "complete")]
    assert bench.faults.reached == [*recovered, (0, "join")]


def test_links_are_made_anew_once_for_each_view_that_asks_for_it() -> None:
    bench = Bench()
    # The view that asked for it first, in generation 4, may never have been heard of here.
    for generation, since in ((2, 0), (3, 0), (5, 4), (6, 4)):
        view = replace(VIEW, generation=generation, links_since=since)
        bench.core.answers[p.Viewed] = [p.EditMesh(view=view, step=0)]
        bench.turn(am.NewView(view=view))
    assert (bench.mesh.edited, bench.mesh.renewed) == ([2, 3, 5, 6], [5])


def resumed() -> p.Resumed:
    recovery = Recovery(
        committed=2,
        record=None,
        base=(),
        now=(),
        source=None,
        lacking={},
        newcomers=(),
        runs={"m0": (1,), "m1": (0,)},
        redone=1,
        folded={},
        reason="m2 was lost",
    )
    return p.Resumed(view=VIEW, recovery=recovery, target=(), own=frozenset(), is_checking=False)


def test_the_memory_of_a_view_that_is_in_order_comes_back_to_the_core_as_an_event() -> None:
    memory = FakeMemory()
    bench = Bench(memory=memory)
    bench.happens(p.Ready(), resumed())
    assert bench.core.events[-1] == p.CopyBudgetSet(parameters_bytes=123, has_room_for_all=False)
    assert memory.plans == [(resumed(), bench.core.shape)]


def test_no_report_is_missed_once_the_view_is_in_order() -> None:
    bench = Bench()
    bench.core.answers[p.Viewed] = [p.EditMesh(view=VIEW, step=0), resumed()]
    bench.core.silent = ("m1",)
    bench.turn(am.NewView(view=VIEW))
    bench.now_s += 2 * RECOVERY_DEADLINE_S
    bench.turn()
    assert bench.channel.told == []


def test_a_commit_is_told_with_the_holders_only_where_they_have_changed() -> None:
    bench = Bench()
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    first, second = bench.channel.told
    assert first == am.Progress(step=3, loss=1.5, samples=4, holders={"0": ("m0", "m1")})
    assert second == am.Progress(step=3, loss=1.5, samples=4)


def test_a_step_that_took_too_much_ends_the_member() -> None:
    bench = Bench(memory=FakeMemory())
    with pytest.raises(NoRoomError, match="12 MiB"):
        bench.happens(p.Ready(), p.Passed(record=RECORD))


def test_work_that_nobody_waits_for_waits_until_the_loop_has_gone_first() -> None:
    bench = Bench()
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.executor.behind.append("a digest")
    bench.executor.results = [p.AppliedBehind(step=3, shard=0, digest=1)]
    bench.turn()
    assert bench.executor.behind, "between a commit and the next run nobody computes"
    assert bench.mesh.waited_s[-1] == pytest.approx(BETWEEN_STEPS_S)
    bench.now_s += BETWEEN_STEPS_S
    bench.turn()
    assert bench.core.events[-1] == p.AppliedBehind(step=3, shard=0, digest=1)


def test_a_reason_that_has_held_for_a_second_is_told_once_and_a_shorter_one_never() -> None:
    bench = Bench()

    def turns(*reasons: str) -> list[am.FromWorker]:
        bench.channel.told.clear()
        for reason in reasons:
            bench.core.reason = reason
            bench.turn()
            bench.now_s += 1.0
        return bench.channel.told

    assert turns("no vote of m1 yet", "no vote of m2 yet", "", "no vote of m2 yet") == []
    told = am.WaitReason(step=0, reason="no vote of m2 yet")
    assert turns("no vote of m2 yet", "no vote of m2 yet", "no vote of m2 yet") == [told]
    bench.core.step = 1
    assert turns("no vote of m2 yet", "no vote of m2 yet") == [am.WaitReason(step=1, reason=told.reason)]


def test_a_reason_that_began_right_after_a_look_is_told_soon_after_its_second() -> None:
    bench = Bench()
    bench.turn()
    bench.core.reason = "no vote of m1 yet"
    began_s = bench.now_s
    while not any(isinstance(told, am.WaitReason) for told in bench.channel.told):
        bench.now_s += 0.05
        bench.turn()
    assert 1.0 <= bench.now_s - began_s < 1.7


def test_after_a_long_step_the_loop_goes_first_for_longer() -> None:
    bench = Bench()
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.now_s += 2.0
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.executor.behind.append("a digest")
    bench.executor.results = [p.AppliedBehind(step=3, shard=0, digest=1)]
    bench.now_s += 2.0 * BETWEEN_STEPS_SHARE - 0.01
    bench.turn()
    assert bench.executor.behind, "members of one machine still update and send on its processors"
    bench.now_s += 0.02
    bench.turn()
    assert bench.core.events[-1] == p.AppliedBehind(step=3, shard=0, digest=1)


def test_a_change_of_the_view_ends_the_delay_of_background_work() -> None:
    bench = Bench()
    bench.core.answers[p.Viewed] = [p.EditMesh(view=VIEW, step=0)]
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.executor.behind.append("an update")
    bench.turn(am.NewView(view=VIEW))
    assert not bench.executor.behind, "a new primary may need the update that it has put off as a backup"


def test_after_a_long_pause_background_work_is_not_held_back_for_long() -> None:
    bench = Bench()
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.now_s += 1000.0
    bench.happens(p.Ready(), p.Passed(record=RECORD))
    bench.executor.behind.append("a digest")
    bench.now_s += BETWEEN_STEPS_MOST_S
    bench.turn()
    assert not bench.executor.behind


def test_background_work_waits_while_the_loop_waits_for_the_whole_state_but_not_for_ever() -> None:
    bench = Bench()
    bench.executor.behind.append("a digest")
    bench.happens(p.StateWanted())
    bench.now_s += BETWEEN_STEPS_MOST_S - 0.01
    bench.turn()
    assert bench.executor.behind
    bench.now_s += 0.02
    bench.turn()
    assert not bench.executor.behind, "the state may be missing because of that work"


def test_alone_the_view_is_this_member() -> None:
    bench = Bench(alone=True)
    bench.core.answers[p.Viewed] = [p.Enter(step=0, state=None)]
    bench.engine.start({})
    try:
        assert bench.handover.wait() == p.Enter(step=0, state=None)
    finally:
        bench.engine.close()
    (viewed,) = bench.core.events
    assert isinstance(viewed, p.Viewed)
    assert viewed.view.ids == ("m0",)
    assert bench.mesh.closed
    with pytest.raises(StoppedError, match="the engine has ended"):
        bench.handover.wait()


def test_with_a_launcher_it_says_hello_and_waits_to_be_let_in() -> None:
    bench = Bench()
    bench.core.answers[p.Viewed] = [p.Enter(step=5, state="{}")]
    bench.channel.says.append(am.NewView(view=VIEW))
    bench.agent.note_readable()
    bench.engine.start({"seed": 0})
    try:
        assert bench.handover.wait() == p.Enter(step=5, state="{}")
    finally:
        bench.engine.close()
    assert bench.channel.told == [am.Hello(member="m0", address="unix:m0", spec={"seed": 0})]


def test_what_ends_the_thread_is_reported_there_and_raised_in_the_main_thread() -> None:
    bench = Bench()
    bench.core.answers[p.Ready] = [p.Fail(kind="StateLostError", reason="shard 3 is gone")]
    bench.engine.start({})
    with pytest.raises(StateLostError, match="shard 3 is gone"):
        bench.handover.next_work()
    assert bench.reported_by == ["elastrain-engine"]
    bench.engine.close()


def test_the_loop_does_not_go_on_with_parameters_that_others_may_have_changed_meanwhile() -> None:
    bench = Bench()
    bench.mesh.others_went_on = True
    bench.happens(p.Ready(), p.Advance(record=RECORD))
    bench.handover.end()  # else this would wait
    with pytest.raises(StoppedError):
        bench.handover.next_work()


def test_the_loop_goes_on_when_this_member_is_in_the_others_view() -> None:
    bench = Bench()
    bench.mesh.others_went_on = True
    bench.happens(p.Ready(), p.Advance(record=RECORD))
    bench.mesh.others_went_on = False
    bench.turn(am.NewView(view=VIEW))
    assert bench.handover.next_work() == p.Advance(record=RECORD)
