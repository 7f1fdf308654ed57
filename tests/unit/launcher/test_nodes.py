"""What several agents decide together: their cores, one store in memory, and links that the test opens and cuts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from elastrain.base.thread_status import Station, ThreadStatus
from elastrain.decisions.membership import NOBODY_LEFT
from elastrain.job.world import Member, View
from elastrain.launcher.agent.run_state import describe
from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.faults import grammar
from elastrain.launcher.shared.job_values import (
    Command,
    End,
    Kill,
    KillNode,
    Log,
    NodeRecord,
    Propose,
    PutBegun,
    PutDue,
    PutRecord,
    PutRoster,
    PutSpec,
    Remember,
    Start,
    TakeNumber,
    Tell,
    TellNodes,
)
from elastrain.launcher.shared.notices import NOTICE, Exited, Left, Over, Raised, Stands
from elastrain.launcher.shared.times import LeaveTimes
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.port import MemoryStore
from elastrain.protocol import agent_messages as am
from elastrain.protocol.agent_messages import (
    Diverged,
    Drain,
    Failed,
    Finished,
    FirstCommitAllowed,
    FirstCommitDue,
    Hello,
    LostState,
    Progress,
    Struck,
    Suspect,
)
from tests.support.agents import job_config

NOW = 1000.0


class Agent:
    """One core and what it has been told to do."""

    def __init__(self, cluster: Cluster, name: str, incarnation: int, **config: Any) -> None:
        settings = {"workers": 1, "nodes_min": 3, "nodes_max": 3, **config}
        self.core = Core(job_config(node=name, incarnation=incarnation, **settings), (), choose=lambda m: m[-1])
        self.cluster, self.name = cluster, name
        self.keys = JobKeys(cluster.store, "job")
        self.done: list[Command] = []
        self.alive = True

    @property
    def members(self) -> tuple[str, ...]:
        return self.core.cluster.view.ids if self.core.cluster.view else ()

    @property
    def end(self) -> End | None:
        return self.core.shutdown.end

    def logged(self, event: str) -> list[Log]:
        return [c for c in self.done if isinstance(c, Log) and c.event == event]


class Cluster:
    """Agents that reach one another; what they tell the store is answered in the order in which it was asked."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.agents: dict[str, Agent] = {}
        self.records: dict[str, NodeRecord] = {}
        self.cut: set[frozenset[str]] = set()
        self.store_answers = True
        self.due = self.begun = False
        self.settle_s = 0.0
        self.deaf: set[str] = set()
        """Agents that hear nothing of the others, neither by links nor from the store."""
        self.far_from_store: set[str] = set()
        """Agents that the store does not answer, and that hear of views by links alone."""
        self.now = NOW
        self._asked: deque[tuple[Agent, Command]] = deque()
        self._starts = 0

    def add(self, name: str, **config: Any) -> Agent:
        self._starts += 1
        agent = self.agents[name] = Agent(self, name, self._starts, **config)
        self.put_record(agent, agent.core.cluster.peers.record)
        for other in self.living:
            if other is not agent:
                self.happen(agent, ev.NodeCame(record=self.records[other.name]))
                if frozenset((name, other.name)) not in self.cut:
                    self.link(agent, other)
        self.happen(agent, ev.NodeRegistered(record=agent.core.cluster.peers.record, settle_s=self.settle_s))
        self.answer()
        if self.due:
            agent.core.handle(ev.FirstCommitStands(is_made=False), NOW)
        if self.begun:
            agent.core.handle(ev.FirstCommitStands(), NOW)
        roster, view = self.store.get(agent.keys.prefix + "roster"), self.newest
        if roster is not None:
            self.happen(agent, ev.RosterStands(roster=agent.keys.put_roster(agent.core.cluster.roster or _nobody())))
        if view is not None:
            self.happen(agent, ev.ViewStands(view=view.core.cluster.view))  # type: ignore[arg-type]
        self.answer()
        return agent

    @property
    def newest(self) -> Agent | None:
        known = [agent for agent in self.agents.values() if agent.core.cluster.view is not None]
        return max(known, key=lambda agent: agent.core.cluster.view.generation, default=None)  # type: ignore[union-attr]

    @property
    def living(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.alive]

    def link(self, one: Agent, other: Agent) -> None:
        for here, there in ((one, other), (other, one)):
            self.happen(here, ev.LinkChanged(node=there.name, up=True, reason="linked"))

    def put_record(self, agent: Agent, record: NodeRecord) -> None:
        if agent.name in self.far_from_store:
            return
        self.records[agent.name] = record
        for other in self.living:
            if other is not agent:
                self.happen(other, ev.NodeCame(record=record))

    def do(self, agent: Agent, commands: Sequence[Command]) -> None:
        for command in commands:
            agent.done.append(command)
            match command:
                case PutRecord(if_lost=False):
                    self.put_record(agent, command.record)
                case PutBegun():
                    self.begun = True
                    for other in self.living:
                        other.core.handle(ev.FirstCommitStands(), NOW)
                case TellNodes():
                    for other in self.living:
                        cut_off = frozenset((agent.name, other.name)) in self.cut
                        reached = not cut_off and other.name not in self.deaf
                        if other is not agent and command.node in (None, other.name) and reached:
                            self.happen(other, ev.NoticeCame(node=agent.name, notice=command.message))
                case Propose() | PutSpec() | PutRoster() | TakeNumber() | PutDue():
                    self._asked.append((agent, command))

    def happen(self, agent: Agent, event: ev.Event, now: float | None = None) -> None:
        self.do(agent, agent.core.handle(event, self.now if now is None else now))

    def answer(self) -> None:
        """Everything that was asked of the store, and what follows from it, is dealt with."""
        while self._asked:
            agent, command = self._asked.popleft()
            if not agent.alive:
                continue
            match command:
                case Propose() if not self.store_answers or agent.name in self.far_from_store:
                    self.happen(agent, ev.ProposalAnswered(view=None))
                case Propose():
                    stands = agent.keys.put_view(command.view)
                    self.happen(agent, ev.ProposalAnswered(view=stands))
                    for other in [a for a in self.living if a.name not in self.deaf | self.far_from_store]:
                        self.happen(other, ev.ViewStands(view=stands))
                case PutDue() if self.store_answers and agent.name not in self.far_from_store:
                    self.due = True
                    for other in [a for a in self.living if a.name not in self.far_from_store]:
                        self.happen(other, ev.FirstCommitStands(is_made=False))
                case PutSpec():
                    self.happen(agent, ev.SpecStands(spec=agent.keys.put_spec(command.spec)))
                case PutRoster():
                    roster = agent.keys.put_roster(command.roster)
                    for other in self.living:
                        self.happen(other, ev.RosterStands(roster=roster))
                case TakeNumber():
                    number = agent.keys.take_number("members", at_least=agent.core.cluster.first_unused_number())
                    self.happen(agent, ev.NumberTaken(number=number))

    # ---- what happens to nodes and workers

    def say(self, member: str, message: Any) -> None:
        agent = self.of(member)
        self.happen(agent, ev.WorkerSpoke(member=member, message=message))
        self.answer()

    def of(self, member: str) -> Agent:
        return next(agent for agent in self.living if member in agent.core.cluster.workers.by_id)

    def hello(self, *members: str, **spec: Any) -> None:
        for member in members:
            self.say(member, Hello(member=member, address=f"unix:{member}", spec=spec or {"seed": 0}))

    def commit(self, step: int, *members: str, holders: dict[str, tuple[str, ...]] | None = None) -> None:
        for member in members:
            self.say(member, Progress(step=step, holders=holders))

    def die(self, member: str, exit_code: int = -9) -> None:
        agent = self.of(member)
        self.happen(agent, ev.WorkerDied(member=member, source="mutex", at_s=self.now))
        self.answer()
        self.happen(agent, ev.WorkerExited(member=member, exit_code=exit_code))
        self.answer()

    def kill_node(self, name: str) -> None:
        """Power cut: nobody of it says a word; the others find its port closed, later its lease gone."""
        self.agents[name].alive = False
        for other in self.living:
            self.happen(other, ev.LinkChanged(node=name, up=False, reason="port closed", closed=True))
        self.answer()

    def lease_goes(self, name: str) -> None:
        for other in self.living:
            if other.name != name:
                self.happen(other, ev.LeaseEnded(node=name))
        self.answer()

    def cut_off(self, name: str) -> None:
        """Its links fall silent, one after the other; it lives, and reaches the store."""
        for other in self.living:
            if other.name != name:
                self.cut.add(frozenset((name, other.name)))
                self.happen(other, ev.LinkChanged(node=name, up=False, reason="silence"))
                self.happen(self.agents[name], ev.LinkChanged(node=other.name, up=False, reason="s"), NOW)
        self.answer()
        self.tick(0.6)

    def switch_off(self) -> None:
        """No node hears any other; all of them live, and reach the store."""
        for one, other in permutations(self.living, 2):
            self.cut.add(frozenset((one.name, other.name)))
            self.happen(one, ev.LinkChanged(node=other.name, up=False, reason="silence"))
        self.answer()
        self.tick(0.6)

    def tick(self, after_s: float) -> None:
        self.now += after_s
        for agent in self.living:
            self.do(agent, agent.core.on_tick(self.now))
        self.answer()


def _nobody() -> Any:
    from elastrain.launcher.shared.job_values import Roster

    return Roster(nodes=())


ALL = ("m0", "m1", "m2")
RING: dict[str, tuple[str, ...]] = {"0": ("m0", "m1"), "1": ("m1", "m2"), "2": ("m2", "m0")}


def running(**config: Any) -> Cluster:
    """Three nodes of one worker each, which have committed a step."""
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name, **config)
    cluster.hello(*ALL)
    cluster.commit(0, *ALL, holders=RING)
    return cluster


def a_pair(**config: Any) -> Cluster:
    """Two nodes of one worker each, which have committed a step: either holds everything."""
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2, **config)
    cluster.hello("m0", "m1")
    cluster.commit(0, "m0", "m1", holders={"0": ("m0", "m1")})
    return cluster


def views_of(cluster: Cluster) -> set[tuple[str, ...]]:
    return {agent.members for agent in cluster.living}


# ---- the beginning


def test_workers_start_when_the_last_node_has_come_and_know_their_ranks() -> None:
    cluster = Cluster()
    for name in ("node0", "node1"):
        assert not [c for c in cluster.add(name, workers=2).done if isinstance(c, Start)]
    cluster.add("node2", workers=2)
    starts = [c for name in ("node0", "node1", "node2") for c in cluster.agents[name].done if isinstance(c, Start)]
    assert [(s.member, s.slot, s.rank) for s in starts] == [(f"m{n}", n % 2, n) for n in range(6)]
    assert {(s.world_size, s.group_world_size) for s in starts} == {(6, 3)}
    assert [s.group_rank for s in starts] == [0, 0, 1, 1, 2, 2]


def test_workers_of_a_node_that_comes_late_are_never_rank_0() -> None:
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=4)
    cluster.tick(60.0)  # the last call: the two begin
    late = cluster.add("node2", nodes_min=2, nodes_max=4, workers=2)
    assert not cluster.newest
    starts = [c for c in late.done if isinstance(c, Start)]
    assert [(s.member, s.rank, s.world_size) for s in starts] == [("m2", 2, 3), ("m3", 3, 4)]
    cluster.hello("m0", "m1")
    later = cluster.add("node3", nodes_min=2, nodes_max=4, workers=2)
    assert [c.rank for c in later.done if isinstance(c, Start)] == [2, 3]


def test_first_view_needs_the_workers_of_all_nodes() -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.hello("m2", "m0")
    assert views_of(cluster) == {()}
    cluster.hello("m1")
    assert views_of(cluster) == {ALL}
    assert {m.node for m in cluster.agents["node0"].core.cluster.view.members} == {"node0", "node1", "node2"}  # type: ignore[union-attr]


def test_between_min_and_max_the_last_call_decides() -> None:
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=3, last_call_s=5.0)
    cluster.tick(4.9)
    assert not any(isinstance(c, PutRoster) for agent in cluster.living for c in agent.done)
    cluster.tick(0.2)
    roster = cluster.agents["node1"].core.cluster.roster
    assert roster is not None
    assert [node.name for node in roster.nodes] == ["node0", "node1"]


def test_too_few_nodes_end_with_a_sentence_that_says_who_came() -> None:
    cluster = Cluster()
    cluster.add("node0", join_timeout_s=10.0)
    cluster.add("node1", join_timeout_s=10.0)
    cluster.tick(10.1)
    for agent in cluster.agents.values():
        assert agent.end is not None
        assert agent.end.code == 1
        assert agent.end.sentence.startswith("2 of at least 3 nodes came within 10 s (node0, node1): start the others")


def test_a_nodes_only_worker_that_hangs_in_its_start_is_replaced_too() -> None:
    """It never says hello: its agent learns from the others' keys that it is late."""
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2, join_timeout_s=10.0)
    cluster.hello("m1")
    cluster.tick(10.1)
    ended = {agent.name: [c.member for c in agent.done if isinstance(c, Kill)] for agent in cluster.living}
    assert ended == {"node0": ["m0"], "node1": []}
    cluster.die("m0")
    cluster.hello("m2")
    assert views_of(cluster) == {("m2", "m1")}
    assert [agent.end for agent in cluster.living] == [None, None]


def few_members(**config: Any) -> Cluster:
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, join_timeout_s=10.0, last_call_s=1.0, **config)
    return cluster


def test_fewer_members_than_stages_end_on_every_node_once_all_nodes_are_here() -> None:
    for agent in few_members(nodes_max=2, members_min=3).agents.values():
        assert agent.end is not None
        assert agent.end.code == 1
        assert agent.end.sentence.startswith(
            "--stages 3 asks for pipelines of 3 members, and the nodes that came (node0, node1) have 2: start more"
        )
        assert not any(isinstance(c, Start) for c in agent.done)


def test_another_node_with_the_members_that_stages_lack_is_waited_for() -> None:
    cluster = few_members(nodes_max=3, members_min=3)
    cluster.tick(5.0)
    assert [agent.end for agent in cluster.living] == [None, None]
    cluster.add("node2", nodes_min=2, members_min=3)
    assert {c.member for agent in cluster.living for c in agent.done if isinstance(c, Start)} == {"m0", "m1", "m2"}


def test_members_that_stages_lack_are_waited_for_no_longer_than_nodes() -> None:
    cluster = few_members(nodes_max=3, members_min=3)
    cluster.tick(5.0)
    cluster.tick(5.1)
    assert {agent.end.sentence.split(",")[0] for agent in cluster.agents.values() if agent.end} == {
        "--stages 3 asks for pipelines of 3 members"
    }
    assert all(agent.end is not None for agent in cluster.agents.values())


def test_spec_of_another_node_counts() -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.hello("m0", seed=0)
    cluster.hello("m1", seed=1)
    assert {agent.end.sentence for agent in cluster.agents.values() if agent.end} == {
        "m1 is refused: its seed is 1, the job's is 0: start every worker with the same seed"
    }
    assert all(agent.end is not None for agent in cluster.agents.values())


@pytest.mark.parametrize("ready", [(), ("m0", "m2"), ("m1",)])
def test_node_lost_before_the_first_view_is_not_waited_for_and_joins_when_it_is_back(ready: tuple[str, ...]) -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.hello(*ready)
    cluster.kill_node("node1")
    cluster.lease_goes("node1")
    cluster.hello(*({"m0", "m2"} - set(ready)))
    assert views_of(cluster) == {("m0", "m2")}
    cluster.add("node1")
    cluster.hello("m3")
    assert views_of(cluster) == {("m0", "m2", "m3")}
    assert [agent.end for agent in cluster.living] == [None, None, None]


def test_newcomer_leaves_the_first_view_to_the_nodes_of_the_roster_while_one_lives() -> None:
    """It cannot know that the store has lost its data, and with them a view that another node is in."""
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2)
    cluster.hello("m0")
    cluster.kill_node("node1")
    newcomer = cluster.add("node2", nodes_min=2, nodes_max=2)
    cluster.happen(newcomer, ev.LeaseEnded(node="node1"))
    cluster.hello("m2")
    assert views_of(cluster) == {()}, "node0 does not count node1 among the dead yet"
    cluster.lease_goes("node1")
    assert views_of(cluster) == {("m0", "m2")}


@pytest.mark.parametrize("comes_back", [True, False])
def test_no_first_view_without_a_node_that_may_know_of_one_which_the_store_has_lost(comes_back: bool) -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name, nodes_min=3, nodes_max=3)
    for name in ("node1", "node2"):
        agent = cluster.agents[name]
        cluster.happen(agent, ev.RosterStands(roster=agent.core.cluster.roster, restored=True))
    cluster.hello("m1", "m2")
    cluster.kill_node("node0")
    cluster.lease_goes("node0")
    assert views_of(cluster) == {()}
    if comes_back:  # its successor shows that the one that may have known is dead
        cluster.add("node0", nodes_min=3, nodes_max=3)
        assert views_of(cluster) == {("m1", "m2")}
        return
    cluster.tick(5.9)
    assert views_of(cluster) == {()}
    cluster.tick(0.2)  # as long as absence proves nothing
    assert views_of(cluster) == {("m1", "m2")}


def test_node_that_does_not_reach_the_store_hears_of_views_by_its_links() -> None:
    cluster = running()
    cluster.far_from_store = {"node2"}
    cluster.die("m1")
    assert views_of(cluster) == {("m0", "m2")}
    # What a link missed while it was down is told when it is up again.
    cluster.cut = {frozenset(("node2", other)) for other in ("node0", "node1")}
    cluster.hello("m3")
    assert cluster.agents["node2"].members == ("m0", "m2")
    cluster.cut.clear()
    cluster.happen(cluster.agents["node0"], ev.LinkChanged(node="node2", up=False, reason="silence"))
    cluster.happen(cluster.agents["node0"], ev.LinkChanged(node="node2", up=True, reason="linked"))
    assert views_of(cluster) == {("m0", "m2", "m3")}


def test_node_lost_between_the_first_view_and_the_first_commit_leaves_the_view() -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.hello(*ALL)
    cluster.kill_node("node0")
    assert views_of(cluster) == {("m1", "m2")}
    assert [agent.end for agent in cluster.living] == [None, None]


def test_all_nodes_lost_before_the_first_view_and_started_again_begin_the_job() -> None:
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2)
    for name in ("node0", "node1"):
        cluster.kill_node(name)
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2)
    cluster.hello("m2", "m3")
    assert views_of(cluster) == {("m2", "m3")}


def test_all_nodes_lost_before_the_first_commit_and_started_again_begin_the_job_anew() -> None:
    cluster = Cluster()
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2)
    cluster.hello("m0", "m1")
    for name in ("node0", "node1"):
        cluster.kill_node(name)
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2)
    cluster.hello("m2", "m3")
    assert views_of(cluster) == {("m2", "m3")}
    assert not any(agent.core.cluster.view.begun for agent in cluster.living)  # type: ignore[union-attr]


def allowed(cluster: Cluster) -> list[str]:
    """The members that have been told that the first commit may be made."""
    tells = [c for agent in cluster.living for c in agent.done if isinstance(c, Tell)]
    return [tell.member for tell in tells if isinstance(tell.message, FirstCommitAllowed)]


def before_the_first_commit() -> Cluster:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.hello(*ALL)
    return cluster


def test_the_first_commit_waits_until_the_store_knows_that_it_is_due() -> None:
    cluster = before_the_first_commit()
    agent = cluster.of("m0")
    cluster.happen(agent, ev.WorkerSpoke(member="m0", message=FirstCommitDue()))
    assert not allowed(cluster)
    cluster.answer()
    assert allowed(cluster) == ["m0"]
    cluster.say("m2", FirstCommitDue())
    assert allowed(cluster) == ["m0", "m2"]
    assert sum(isinstance(c, PutDue) for a in cluster.living for c in a.done) == 1, "whoever comes later knows it"


def test_a_first_commit_that_waits_for_a_store_that_is_away_is_parked() -> None:
    cluster = before_the_first_commit()
    cluster.store_answers = False
    agent = cluster.of("m0")
    cluster.say("m0", FirstCommitDue())
    assert not agent.logged("parked"), "it may answer yet"
    cluster.happen(agent, ev.StoreWentAway(problem="no answer within 4 s"))
    assert [log.say for log in agent.logged("parked")] == [
        "parked: the first commit of the job waits for the store, which does not answer"
    ]
    cluster.happen(agent, ev.StoreCameBack())
    cluster.happen(agent, ev.FirstCommitStands(is_made=False))
    assert allowed(cluster) == ["m0"] and len(agent.logged("unparked")) == 1


def test_a_member_that_the_view_is_without_is_not_told_that_it_may_commit() -> None:
    cluster = before_the_first_commit()
    agent = cluster.of("m0")
    cluster.store_answers = False
    cluster.say("m0", FirstCommitDue())
    view = agent.core.cluster.view
    assert view is not None
    others = replace(view, generation=2, members=view.members[1:])
    cluster.happen(agent, ev.ViewStands(view=others))
    cluster.happen(agent, ev.FirstCommitStands(is_made=False))
    assert not allowed(cluster)


@pytest.mark.parametrize("proven", [True, False], ids=["proven", "presumed"])
@pytest.mark.parametrize("due", [True, False], ids=["due", "not due"])
def test_nobody_begins_anew_where_the_silent_may_have_made_the_first_commit(due: bool, proven: bool) -> None:
    cluster = before_the_first_commit()
    if due:
        cluster.say("m0", FirstCommitDue())
    late = cluster.add("node3", nodes_max=4)
    for name in ("node0", "node1", "node2"):
        if proven:
            exits = Exited(member=f"m{name[-1]}")
            cluster.happen(late, ev.NoticeCame(node=name, notice=exits))
        cluster.agents[name].alive = False
        cluster.happen(late, ev.LinkChanged(node=name, up=False, reason="silence"))
        cluster.happen(late, ev.LeaseEnded(node=name))
    cluster.hello("m3")
    cluster.tick(10.0)
    cluster.answer()
    if due and not proven:
        assert late.end is not None and late.end.code == 1 and "every member of the view is gone" in late.end.sentence
    else:
        assert late.end is None and late.members == ("m3",)


@pytest.mark.parametrize("old_key_of_the_other", [True, False])
def test_all_nodes_lost_and_started_again_under_the_same_names_say_that_the_state_is_gone(
    old_key_of_the_other: bool,
) -> None:
    cluster = a_pair()
    cluster.kill_node("node0")
    cluster.agents["node1"].alive = False
    again = cluster.add("node0", nodes_min=2, nodes_max=2)
    if old_key_of_the_other:
        cluster.happen(again, ev.NodeCame(record=cluster.records["node1"]))
    cluster.add("node1", nodes_min=2, nodes_max=2)
    cluster.answer()
    assert [(a.end.code, a.end.sentence) for a in cluster.living if a.end] == [(1, NOBODY_LEFT)] * 2


def test_node_of_the_view_that_is_nowhere_to_be_found_is_dead() -> None:
    cluster = a_pair()
    for name in ("node0", "node1"):
        cluster.agents[name].alive = False
    (again,) = [cluster.add("node0", nodes_min=2, nodes_max=2)]
    assert again.end is None
    cluster.tick(6.1)
    assert again.end is not None
    assert (again.end.code, again.end.sentence) == (1, NOBODY_LEFT)


@pytest.mark.parametrize("comes", ["record", "link", "nothing"])
def test_node_whose_lease_ends_before_it_was_met_has_time_to_answer(comes: str) -> None:
    cluster = Cluster()
    cluster.cut.add(frozenset(("node0", "node1")))
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.lease_goes("node1")
    cluster.tick(1.0)
    if comes == "record":
        cluster.put_record(cluster.agents["node1"], cluster.records["node1"])
    if comes == "link":
        cluster.link(cluster.agents["node0"], cluster.agents["node1"])
    cluster.tick(1.5)
    assert len(cluster.agents["node0"].logged("node_dead")) == (1 if comes == "nothing" else 0)


def test_node_that_was_taken_for_dead_counts_again_if_the_same_start_of_it_comes_back() -> None:
    cluster = running()
    agent = cluster.agents["node0"]
    cluster.store_answers = False
    for other in ("node2", "node0"):
        cluster.happen(cluster.agents[other], ev.LinkChanged(node="node1", up=False, reason="silent"))
    cluster.happen(agent, ev.LeaseEnded(node="node1"))
    assert agent.core.cluster.gone_from_view() == ["m1"]
    record = cluster.records["node1"]
    cluster.happen(agent, ev.NodeCame(record=replace(record, incarnation=record.incarnation + 7)))
    assert agent.core.cluster.gone_from_view() == ["m1"], "no worker outlives its agent"
    agent.core.cluster.peers.nodes.pop("node1")
    cluster.happen(agent, ev.NodeCame(record=record))
    assert agent.core.cluster.gone_from_view() == []


def test_each_node_that_was_never_met_has_its_own_time_to_answer() -> None:
    cluster = Cluster()
    cluster.cut |= {frozenset(("node0", other)) for other in ("node1", "node2")}
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    agent = cluster.agents["node0"]
    cluster.happen(agent, ev.LeaseEnded(node="node1"))
    cluster.tick(1.5)
    cluster.happen(agent, ev.LeaseEnded(node="node2"))
    cluster.happen(agent, ev.NodeCame(record=cluster.records["node1"]))
    cluster.tick(1.0)
    assert not agent.logged("node_dead")
    cluster.tick(1.5)
    (said,) = (log.fields for log in agent.logged("node_dead"))
    assert said["node"] == "node2"
    assert said["reason"] == "its lease is gone, and its agent was never reached"


def test_node_whose_script_ended_well_before_the_first_commit_is_not_lost() -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.cut.add(frozenset(("node0", "node1")))  # node0 hears nothing of it but what the store says
    cluster.die("m1", exit_code=0)
    assert cluster.agents["node1"].end is not None
    cluster.happen(cluster.agents["node0"], ev.NodeLeft(node="node1"), NOW)
    cluster.kill_node("node1")
    cluster.lease_goes("node1")
    assert [agent.end for agent in cluster.living] == [None, None]


# ---- losses


def test_death_on_one_node_makes_one_new_view_for_all_and_its_own_node_starts_another() -> None:
    cluster = running()
    cluster.die("m1")
    assert views_of(cluster) == {("m0", "m2")}
    assert {agent.core.cluster.view.generation for agent in cluster.living} == {2}  # type: ignore[union-attr]
    assert [c.member for c in cluster.agents["node1"].done if isinstance(c, Start)] == ["m1", "m3"]
    cluster.hello("m3")
    assert views_of(cluster) == {("m0", "m2", "m3")}


def test_agents_that_propose_for_the_same_loss_agree_on_the_faster_ones_view() -> None:
    cluster = running()
    for member in ("m0", "m2"):  # both agents ask before either is answered
        agent = cluster.of(member)
        cluster.happen(
            agent, ev.WorkerSpoke(member=member, message=Suspect(member="m1", reason="ended", dead=True)), NOW
        )
    assert sum(isinstance(c, Propose) for agent in cluster.living for c in agent.done if isinstance(c, Propose)) >= 2
    cluster.answer()
    assert views_of(cluster) == {("m0", "m2")}
    assert cluster.agents["node0"].core.cluster.view.generation == 2  # type: ignore[union-attr]


def test_members_of_a_killed_node_leave_in_one_view_by_the_majority_of_the_others() -> None:
    cluster = running()
    cluster.kill_node("node2")
    assert views_of(cluster) == {("m0", "m1")}
    assert cluster.agents["node0"].core.cluster.view.generation == 2  # type: ignore[union-attr]


def test_even_split_waits_for_the_lease() -> None:
    cluster = a_pair()
    cluster.kill_node("node1")
    assert views_of(cluster) == {("m0", "m1")}
    assert "no strict majority" in cluster.agents["node0"].logged("parked")[0].say
    cluster.lease_goes("node1")
    assert views_of(cluster) == {("m0",)}


def test_missing_lease_of_a_node_that_still_answers_proves_nothing() -> None:
    cluster = running()
    cluster.lease_goes("node1")
    assert views_of(cluster) == {ALL}
    cluster.kill_node("node1")
    assert views_of(cluster) == {("m0", "m2")}


def lose_link(cluster: Cluster, name: str, other: str) -> None:
    cluster.happen(cluster.agents[name], ev.LinkChanged(node=other, up=False, reason="silence"))
    cluster.answer()


def dead_for(cluster: Cluster, name: str) -> set[str]:
    return {log.fields["node"] for log in cluster.agents[name].logged("node_dead")}


def test_a_node_without_a_lease_lives_while_another_reaches_it() -> None:
    """Node 2 has lost the store, and trains on with node 1: node 0, which reaches neither, waits as long as that."""
    cluster = running()
    cluster.cut_off("node0")
    for agent in cluster.living[:2]:
        cluster.happen(agent, ev.LeaseEnded(node="node2"))
    cluster.tick(300.0)
    assert cluster.records["node1"].reaches == (cluster.records["node2"].signature,)
    assert not dead_for(cluster, "node0")
    lose_link(cluster, "node1", "node2")
    assert dead_for(cluster, "node0") == dead_for(cluster, "node1") == {"node2"}


def test_a_link_that_falls_silent_after_the_lease_proves_no_death_either() -> None:
    cluster = running()
    for agent in cluster.living[:2]:
        cluster.happen(agent, ev.LeaseEnded(node="node2"))
    lose_link(cluster, "node0", "node2")
    cluster.tick(300.0)
    assert not dead_for(cluster, "node0")
    lose_link(cluster, "node1", "node2")
    assert dead_for(cluster, "node0") == dead_for(cluster, "node1") == {"node2"}
    assert not [agent.name for agent in cluster.living[:2] if any(said(agent))], "nobody asks any more"


def said(agent: Agent) -> tuple[tuple[str, ...], ...]:
    record = agent.cluster.records[agent.name]
    return record.asks, record.reaches, record.misses


def test_a_word_that_is_owed_is_waited_for_until_the_lease_of_its_node_ends() -> None:
    cluster = running()
    cluster.cut_off("node0")
    cluster.agents["node1"].alive = False
    cluster.happen(cluster.agents["node0"], ev.LeaseEnded(node="node2"))
    assert not dead_for(cluster, "node0")
    cluster.happen(cluster.agents["node0"], ev.LeaseEnded(node="node1"))
    assert dead_for(cluster, "node0") == {"node1", "node2"}


def test_a_word_that_is_owed_is_not_waited_for_without_end() -> None:
    cluster = running()
    cluster.cut_off("node0")
    cluster.agents["node1"].alive = False
    cluster.happen(cluster.agents["node0"], ev.LeaseEnded(node="node2"))
    cluster.tick(29.0)
    assert not dead_for(cluster, "node0")
    cluster.happen(cluster.agents["node0"], ev.StoreWentAway(problem="cannot be reached"))
    cluster.tick(2.0)
    assert not dead_for(cluster, "node0"), "what was said meanwhile cannot be read"
    cluster.happen(cluster.agents["node0"], ev.StoreCameBack())
    cluster.tick(31.0)
    assert dead_for(cluster, "node0") == {"node2"}


def test_two_that_ask_for_the_same_node_answer_one_another_by_asking() -> None:
    cluster = running()
    cluster.switch_off()
    cluster.agents["node2"].alive = False
    cluster.lease_goes("node2")
    assert dead_for(cluster, "node0") == dead_for(cluster, "node1") == {"node2"}


def test_who_has_put_a_view_since_was_not_dead() -> None:
    """An outage took both leases; one that is back in the store puts a view before its own key is there again."""
    cluster = running()
    cluster.cut_off("node2")
    cut_off = cluster.agents["node2"]
    cluster.far_from_store |= {"node0", "node1"}
    later = replace(cluster.agents["node0"].core.cluster.view, generation=7)  # type: ignore[type-var]
    for name in ("node0", "node1"):
        cluster.happen(cut_off, ev.LeaseEnded(node=name))
    assert dead_for(cluster, "node2") == {"node0", "node1"}
    cluster._asked.clear()  # its own proposal comes too late
    cluster.happen(cut_off, ev.ViewStands(view=later))
    assert cut_off.core.cluster.gone_from_view() == [] and cut_off.end is None
    cluster.tick(6.5)
    assert cut_off.core.cluster.gone_from_view() == ["m0", "m1"], "neither a key nor an answer since"


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_node_that_was_gone_before_another_came_is_dead_if_nobody_reaches_it(is_reached: bool) -> None:
    cluster = running()
    cluster.cut.add(frozenset(("node2", "node3")))
    for name in ("node0", "node1"):
        cluster.happen(cluster.agents[name], ev.LeaseEnded(node="node2"))
    del cluster.records["node2"]
    cluster.agents["node2"].alive = False
    late = cluster.add("node3")
    assert "node2" not in late.core.cluster.peers.nodes and late.members == ALL
    if not is_reached:
        for name in ("node0", "node1"):
            lose_link(cluster, name, "node2")
    cluster.tick(6.5)
    assert ("m2" in late.members) == is_reached and not late.core.cluster.gone_from_view()


def test_isolated_node_can_not_remove_the_majority() -> None:
    cluster = running()
    isolated = cluster.agents["node2"]
    cluster.cut_off("node2")
    assert cluster.agents["node0"].members == ("m0", "m1")
    proposals = [c for c in isolated.done if isinstance(c, Propose)]
    assert all("m0" in c.view.ids and "m1" in c.view.ids for c in proposals)


def test_isolated_minority_says_that_it_is_parked_why_and_since_when() -> None:
    cluster = running()
    isolated = cluster.agents["node2"]
    cluster.store_answers = False
    cluster.happen(isolated, ev.StoreWentAway(problem="no answer within 4 s"))
    began = cluster.now
    cluster.cut_off("node2")
    cluster.tick(10.0)
    (said,) = isolated.logged("parked")
    assert said.say.startswith("parked: m0, m1 suspected but not proven dead, and the others are no strict majority")
    state = describe(isolated.core, "job", cluster.now)
    assert said.say == f"parked: {state['parked']}"
    assert (round(state["parked_s"]), round(state["store_away_s"])) == (10, round(cluster.now - began))
    assert isolated.end is None


def test_node_that_may_not_judge_is_parked_too_when_the_others_are_silent() -> None:
    cluster = running()
    cluster.die("m2")  # its replacement has not committed anything yet
    isolated = cluster.agents["node2"]
    cluster.cut_off("node2")
    assert [log.say for log in isolated.logged("parked")] == [
        "parked: m0, m1 suspected but not proven dead, and the others are no strict majority; it waits for an answer "
        "of theirs, or for the end of their leases"
    ]


def test_parked_node_ends_after_its_limit_and_the_others_do_not() -> None:
    cluster = running(park_timeout_s=60.0)
    isolated = cluster.agents["node2"]
    cluster.deaf.add("node2")  # it is cut off from the store, too
    cluster.cut_off("node2")
    cluster.tick(59.0)
    assert isolated.end is None
    cluster.tick(2.0)
    assert isolated.end is not None
    assert (isolated.end.code, isolated.end.everywhere, isolated.end.job_is_over) == (1, False, False)
    assert isolated.end.sentence.startswith("parked for 60 s: m0, m1 suspected but not proven dead")
    assert isolated.end.sentence.endswith("Raise --park-timeout to wait longer")
    assert [cluster.agents[name].end for name in ("node0", "node1")] == [None, None]


def test_nodes_that_answer_again_end_the_parking() -> None:
    cluster = a_pair(park_timeout_s=60.0)
    cluster.cut_off("node1")
    assert all(agent.core.parking.parked is not None for agent in cluster.living)
    cluster.cut.clear()
    cluster.link(cluster.agents["node0"], cluster.agents["node1"])
    assert [len(agent.logged("unparked")) for agent in cluster.living] == [1, 1]
    cluster.tick(100.0)
    assert [agent.end for agent in cluster.living] == [None, None]
    assert views_of(cluster) == {("m0", "m1")}


def test_node_that_comes_back_when_the_job_is_over_ends_and_does_not_begin_anew() -> None:
    cluster = running()
    isolated = cluster.agents["node2"]
    cluster.deaf.add("node2")  # it is cut off from the store, too
    cluster.cut_off("node2")
    cluster.happen(isolated, ev.ViewRemoved())
    assert isolated.end is not None
    assert (isolated.end.code, isolated.end.everywhere) == (1, False)
    assert isolated.end.sentence == "the job has ended while this node could not be reached"


def test_the_end_of_the_job_that_is_heard_while_a_proposal_is_under_way_counts_after_its_answer() -> None:
    cluster = running()
    isolated = cluster.agents["node2"]
    cluster.deaf.add("node2")
    cluster.cut_off("node2")
    isolated.core._views.proposing = True  # its answer is on its way
    cluster.happen(isolated, ev.ViewRemoved())
    assert isolated.end is None
    cluster.happen(isolated, ev.ProposalAnswered(view=None))
    assert isolated.end is not None
    assert isolated.end.sentence == "the job has ended while this node could not be reached"


def test_view_that_somebody_took_away_from_living_nodes_is_put_again() -> None:
    cluster = running()
    agent = cluster.agents["node0"]
    cluster.store.commit(expect={}, delete=[agent.keys.prefix + "view"])
    cluster.happen(agent, ev.ViewRemoved())
    cluster.answer()
    assert all(agent.end is None for agent in cluster.living)
    assert cluster.store.get(agent.keys.prefix + "view") is not None
    cluster.die("m1")
    assert views_of(cluster) == {("m0", "m2")}


def test_successor_of_a_node_that_has_gone_does_not_bear_out_that_the_job_goes_on() -> None:
    cluster = running()
    agent = cluster.agents["node0"]
    for name in ("node1", "node2"):
        later = replace(agent.core.cluster.peers.nodes[name].record, incarnation=9)
        cluster.happen(agent, ev.NodeCame(record=later))
        cluster.happen(agent, ev.LinkChanged(node=name, up=True, reason="its agent answers"))
    cluster.happen(agent, ev.ViewRemoved())
    cluster.happen(agent, ev.ProposalAnswered(view=None))  # the view without them has no keys to stand in any more
    assert agent.end is not None
    assert agent.end.sentence == "the job has ended while this node could not be reached"


def test_members_that_a_view_leaves_out_are_told_and_ended_if_they_stay() -> None:
    cluster = running()
    cluster.cut_off("node2")
    told = [c.message for c in cluster.agents["node2"].done if isinstance(c, Tell)]
    assert [message.view.ids for message in told if isinstance(message, am.NewView)][-1] == ("m0", "m1")
    cluster.tick(2.1)
    assert [c.member for c in cluster.agents["node2"].done if isinstance(c, Kill)] == ["m2"]


def test_agent_that_lost_its_only_member_does_not_judge_by_what_that_had_said_when_its_replacement_is_ready() -> None:
    cluster = running()
    cluster.die("m0")
    for step in range(1, 17):
        cluster.commit(step, "m1", "m2", holders=dict.fromkeys("012", ("m1", "m2")))
    cluster.die("m1")
    cluster.commit(17, "m2", holders=dict.fromkeys("012", ("m2",)))
    cluster.hello("m3", "m4")
    assert [agent.end for agent in cluster.living] == [None, None, None]
    assert views_of(cluster) == {("m2", "m3", "m4")}


def test_newcomer_that_has_said_nothing_yet_lets_its_agent_remove_the_dead_and_says_itself_that_state_is_lost() -> None:
    cluster = a_pair()
    cluster.die("m1")
    cluster.hello("m2")
    assert views_of(cluster) == {("m0", "m2")}
    cluster.kill_node("node0")
    (survivor,) = cluster.living
    assert survivor.core.parking.parked is not None
    cluster.lease_goes("node0")
    assert survivor.members == ("m2",)
    cluster.say("m2", LostState(sentence="no member of the job is left"))
    assert survivor.end is not None
    assert (survivor.end.code, survivor.end.everywhere) == (1, True)


def test_last_member_dies_with_its_node_while_no_other_is_in_the_view() -> None:
    cluster = a_pair()
    cluster.die("m1")
    assert views_of(cluster) == {("m0",)}
    cluster.kill_node("node0")
    cluster.lease_goes("node0")
    (survivor,) = cluster.living
    assert survivor.end is None, "it may be on its way back"
    cluster.tick(2.1)
    assert survivor.end is not None
    assert (survivor.end.code, survivor.end.sentence) == (1, NOBODY_LEFT)


def test_last_member_that_was_cut_off_comes_back_a_moment_after_its_lease() -> None:
    cluster = a_pair()
    cluster.die("m1")
    cluster.cut_off("node1")
    other = cluster.agents["node1"]
    cluster.happen(other, ev.LeaseEnded(node="node0"))
    cluster.answer()
    cluster.tick(1.0)
    cluster.happen(other, ev.NodeCame(record=cluster.records["node0"]))
    cluster.tick(5.0)
    assert other.end is None and other.members == ("m0",)


def test_last_member_killed_ends_the_job_on_every_node_with_one_sentence() -> None:
    cluster = running()
    cluster.die("m1")
    cluster.die("m2")
    cluster.die("m0")
    sentence = "m0 ended by SIGKILL, and no other member was left: the state is gone"
    assert [(a.end.code, a.end.sentence) for a in cluster.living if a.end] == [(1, sentence)] * 3


def test_agent_that_has_missed_a_view_does_not_end_the_job_for_the_members_of_the_old_one() -> None:
    cluster = running()
    late = cluster.agents["node2"]
    cluster.die("m2")  # its agent has no member left
    cluster.deaf.add("node2")
    cluster.die("m1")
    cluster.hello("m4")
    cluster.die("m0")
    cluster.deaf.clear()
    for node in ("node0", "node1"):
        late.core.cluster.peers.nodes[node].linked = False
    late.core.cluster.peers.dead_members.add("m0")  # links are quicker than the store
    cluster.happen(late, ev.NoticeCame(node="node1", notice=Exited(member="m1")))
    assert isinstance(late.done[-1], Propose) and not late.done[-1].view.members
    cluster.answer()
    assert late.members == ("m4",)
    assert [agent.end for agent in cluster.living] == [None, None, None]


@pytest.mark.parametrize("kind", [LostState, Diverged])
def test_lost_or_diverged_state_seen_by_one_member_ends_all_nodes_with_that_sentence(
    kind: type[LostState | Diverged],
) -> None:
    cluster = running()
    cluster.say("m0", kind(sentence="shard 3 is gone"))
    assert {(a.end.code, a.end.sentence) for a in cluster.living if a.end} == {(1, "shard 3 is gone")}
    assert all(agent.end is not None for agent in cluster.living)


def test_suspicion_of_a_member_elsewhere_leaves_it_out_of_the_view() -> None:
    cluster = running()
    cluster.say("m0", Suspect(member="m1", reason="reset"))
    cluster.say("m2", Suspect(member="m1", reason="reset"))
    cluster.tick(1.1)
    assert views_of(cluster) == {("m0", "m2")}
    cluster.tick(2.1)
    killed = {agent.name: [c.member for c in agent.done if isinstance(c, Kill)] for agent in cluster.living}
    assert killed == {"node0": [], "node1": ["m1"], "node2": []}


def lost_link(by: str, member: str, generation: int = 1) -> tuple[str, Suspect]:
    return by, Suspect(member=member, reason="reset", generation=generation, link_lost=True)


def links_since(cluster: Cluster) -> set[int]:
    return {agent.core.cluster.view.links_since for agent in cluster.living if agent.core.cluster.view}


def test_members_that_have_lost_their_link_first_make_it_anew_and_then_one_goes() -> None:
    cluster = running()
    cluster.say(*lost_link("m1", "m2"))
    cluster.tick(1.1)
    assert (views_of(cluster), links_since(cluster)) == ({ALL}, {2})
    # Both ends hang up on the old link, each at its own time: what is said of that is out of date.
    cluster.say(*lost_link("m2", "m1"))
    cluster.tick(1.1)
    assert (views_of(cluster), links_since(cluster)) == ({ALL}, {2})
    cluster.say(*lost_link("m2", "m1", generation=2))
    cluster.tick(1.1)
    assert views_of(cluster) == {("m0", "m2")}
    assert links_since(cluster) == {2}


def test_links_are_made_anew_again_where_a_step_was_committed_since() -> None:
    cluster = running()
    cluster.say(*lost_link("m1", "m2"))
    cluster.tick(1.1)
    cluster.commit(1, *ALL, holders=RING)
    cluster.say(*lost_link("m1", "m2", generation=2))
    cluster.tick(1.1)
    assert (views_of(cluster), links_since(cluster)) == ({ALL}, {3})


def test_lost_links_are_judged_when_all_nodes_answer_again_and_nobody_is_removed_for_a_switch_that_was_off() -> None:
    cluster = running()
    cluster.switch_off()
    for by in ALL:
        for member in set(ALL) - {by}:
            cluster.say(*lost_link(by, member))
    cluster.tick(60.0)
    assert [len(agent.logged("parked")) for agent in cluster.living] == [1, 1, 1]
    cluster.cut.clear()
    cluster.link(cluster.agents["node1"], cluster.agents["node2"])
    cluster.tick(1.0)  # node0 gets its links a moment later
    assert views_of(cluster) == {ALL}
    cluster.link(cluster.agents["node0"], cluster.agents["node1"])
    cluster.link(cluster.agents["node0"], cluster.agents["node2"])
    cluster.tick(1.1)
    assert (views_of(cluster), links_since(cluster)) == ({ALL}, {2})
    assert not any(isinstance(c, Kill) for agent in cluster.living for c in agent.done)


def test_node_that_does_not_come_back_with_the_others_is_removed_a_little_later() -> None:
    cluster = running()
    cluster.switch_off()
    cluster.tick(60.0)
    cluster.cut.discard(frozenset(("node1", "node2")))
    cluster.link(cluster.agents["node1"], cluster.agents["node2"])
    cluster.tick(2.9)
    assert cluster.agents["node1"].members == ALL
    cluster.tick(0.2)
    assert cluster.agents["node1"].members == ("m1", "m2")


def test_lost_link_is_judged_again_where_the_store_did_not_answer() -> None:
    cluster = running()
    cluster.store_answers = False
    cluster.say(*lost_link("m1", "m2"))
    cluster.tick(1.1)
    assert links_since(cluster) == {0}
    cluster.store_answers = True
    cluster.tick(1.1)
    assert links_since(cluster) == {2}


def test_newcomers_that_can_not_reach_the_only_holder_do_not_end_it_and_one_of_them_goes() -> None:
    cluster = running()
    for member in ("m1", "m2"):
        cluster.die(member)
    cluster.hello("m3", "m4")
    assert views_of(cluster) == {("m0", "m3", "m4")}
    cluster.commit(1, "m0", holders={"0": ("m0",), "1": ("m0",), "2": ("m0",)})
    for member in ("m3", "m4"):
        cluster.say(member, Suspect(member="m0", reason="no report"))
    cluster.tick(1.1)
    assert views_of(cluster) == {("m0", "m3")}
    (chosen,) = [log for agent in cluster.living for log in agent.logged("end_suspect")]
    assert chosen.say == "m4 lives, but it cannot reach m0: it is ended"


def test_agents_that_have_heard_different_words_do_not_end_two_members() -> None:
    cluster = running()
    cluster.cut.add(frozenset(("node0", "node1")))  # what is said there comes too late
    cluster.say("m1", Suspect(member="m2", reason="reset"))
    cluster.say("m2", Suspect(member="m0", reason="reset"))
    cluster.cut.clear()
    cluster.tick(1.1)
    cluster.tick(3.0)
    killed = [c.member for agent in cluster.living for c in agent.done if isinstance(c, Kill)]
    assert killed == ["m0"]
    assert views_of(cluster) == {("m1", "m2")}


def test_agent_whose_members_are_all_gone_removes_nobody_who_is_only_silent() -> None:
    cluster = running(max_restarts=0, workers=1)
    cluster.die("m1")
    before = views_of(cluster)
    agent = cluster.agents["node0"]
    cluster.die("m0")
    cluster.happen(agent, ev.LinkChanged(node="node2", up=False, reason="port closed", closed=True))
    cluster.answer()
    assert before == {("m0", "m2")}
    assert agent.members == ("m2",)


def test_agent_that_was_out_of_reach_hears_of_a_death_when_it_is_linked_again() -> None:
    cluster = running()
    one, other = cluster.agents["node0"], cluster.agents["node1"]
    for agent in (one, cluster.agents["node2"]):
        cluster.cut.add(frozenset((agent.name, "node1")))
    cluster.store_answers = False
    cluster.die("m1")
    assert views_of(cluster) == {ALL}
    cluster.cut.clear()
    other.core.cluster.peers.nodes["node0"].linked = False
    cluster.happen(other, ev.LinkChanged(node="node0", up=True, reason="again"), NOW)
    cluster.store_answers = True
    cluster.tick(1.0)
    assert one.members == ("m0", "m2")


# ---- nodes that come later


def test_returning_node_joins_as_a_new_member() -> None:
    cluster = running()
    cluster.kill_node("node2")
    cluster.lease_goes("node2")
    late = cluster.add("node2")
    starts = [c for c in late.done if isinstance(c, Start)]
    assert [(s.member, s.warm_up) for s in starts] == [("m3", True)]
    cluster.hello("m3")
    assert views_of(cluster) == {("m0", "m1", "m3")}


def test_successor_under_the_same_name_proves_the_death_of_what_was_there() -> None:
    cluster = a_pair()
    cluster.kill_node("node1")
    cluster.add("node1", nodes_min=2, nodes_max=2)
    assert cluster.agents["node0"].members == ("m0",)


def test_newcomer_waits_until_its_agent_reaches_every_node_of_the_view() -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name, nodes_max=4)
    cluster.tick(5.1)
    cluster.hello(*ALL)
    cluster.commit(0, *ALL, holders=RING)
    late = cluster.add("node3", nodes_max=4)
    late.core.cluster.peers.nodes["node1"].linked = False
    cluster.hello("m3")
    assert views_of(cluster) == {ALL}
    cluster.link(late, cluster.agents["node1"])
    cluster.answer()
    assert views_of(cluster) == {(*ALL, "m3")}


def test_node_too_many_is_refused_with_the_names_of_those_who_are_there() -> None:
    cluster = running()
    late = cluster.add("node3")
    assert late.end is not None
    assert late.end.sentence.startswith("the job has all its 3 nodes (node0, node1, node2)")
    assert all(agent.end is None for agent in cluster.living if agent is not late)


# ---- the store away


def test_loss_while_the_store_is_away_parks_says_so_and_goes_on_when_it_is_back() -> None:
    cluster = running()
    cluster.store_answers = False
    cluster.die("m1")
    assert views_of(cluster) == {ALL}
    for name in ("node0", "node2"):
        assert [log.say for log in cluster.agents[name].logged("parked")] == [
            "parked: m1 lost, and the store does not answer: the view cannot change until it is back"
        ]
    cluster.tick(0.6)
    assert len(cluster.agents["node0"].logged("parked")) == 1
    cluster.store_answers = True
    cluster.tick(0.6)
    assert views_of(cluster) == {("m0", "m2")}
    assert cluster.agents["node0"].core.parking.parked is None


def test_outage_of_the_store_is_told_once_and_so_is_its_end() -> None:
    cluster = running()
    agent = cluster.agents["node0"]
    for _ in range(3):
        cluster.happen(agent, ev.StoreWentAway(problem="no answer"))
    cluster.now += 30.0
    for _ in range(2):
        cluster.happen(agent, ev.StoreCameBack())
    assert [len(agent.logged(event)) for event in ("store_away", "store_back")] == [1, 1]
    assert agent.logged("store_back")[0].say == "the store answers again, after 30 s"
    assert agent.core.parking.parked is None


# ---- failures of the script


def raised(member: str, micro_batch: int | None = 3, signature: str = "ValueError at train.py:7") -> Failed:
    return Failed(step=5, micro_batch=micro_batch, signature=signature, traceback=f"Traceback on {member}")


def test_same_failure_on_members_of_two_nodes_ends_the_job_on_all_with_its_traceback() -> None:
    cluster = running()
    cluster.say("m0", raised("m0"))
    assert all(agent.end is None for agent in cluster.living)
    cluster.die("m0", 1)
    cluster.say("m1", raised("m1"))
    ends = {(a.end.code, a.end.sentence, a.end.detail) for a in cluster.living if a.end}
    assert all(agent.end is not None for agent in cluster.living)
    sentence = (
        "m0 and m1 raised the same exception at step 5, micro-batch 3: it is a fault in the script, not in a machine"
    )
    assert ends == {(1, sentence, "Traceback on m1")}


def test_node_that_learns_of_the_end_from_the_store_shows_its_traceback_too() -> None:
    cluster = running()
    late = cluster.agents["node2"]
    cluster.happen(
        late, ev.EndStands(over=Over(code=1, sentence="a fault in the script", detail="Traceback on m1")), NOW
    )
    assert late.end is not None
    assert (late.end.code, late.end.detail) == (1, "Traceback on m1")


@pytest.mark.parametrize("word", ["link", "store"])
def test_node_that_hears_of_the_end_knows_that_the_job_is_over(word: str) -> None:
    """Who said so was killed in the same moment: nodes that were started again waited two minutes for a dead job."""
    cluster = running()
    hears, over = (
        cluster.agents["node0"],
        Over(code=1, sentence="all holders of shard 1 are gone", detail="", lost=True),
    )
    told = ev.NoticeCame(node="node2", notice=over) if word == "link" else ev.EndStands(over=over)
    cluster.happen(hears, told, NOW)
    assert hears.end == End(code=1, sentence=over.sentence, everywhere=False, job_is_over=True, lost=True)


@pytest.mark.parametrize(
    "other", [raised("m1", micro_batch=4), raised("m1", signature="KeyError at x.py:1"), raised("m1", micro_batch=None)]
)
def test_other_failures_on_another_node_do_not_end_the_job(other: Failed) -> None:
    cluster = running()
    cluster.say("m0", raised("m0"))
    cluster.die("m0", 1)
    cluster.say("m1", other)
    assert all(agent.end is None for agent in cluster.living)


def test_failure_that_a_node_missed_is_told_when_its_agent_answers_again() -> None:
    cluster = running()
    cluster.cut.add(frozenset(("node0", "node1")))
    cluster.say("m0", raised("m0"))
    cluster.cut.clear()
    for agent, other in (("node0", "node1"), ("node1", "node0")):
        cluster.agents[agent].core.cluster.peers.nodes[other].linked = False
    cluster.link(cluster.agents["node0"], cluster.agents["node1"])
    cluster.say("m1", raised("m1"))
    assert all(agent.end is not None and agent.end.detail for agent in cluster.living)


def test_failure_after_a_commit_ends_no_node_that_has_not_heard_of_the_commit() -> None:
    """The store's news was late there: it ended a job for all whose state was whole."""
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    cluster.hello(*ALL)
    agent = cluster.agents["node1"]
    assert not agent.core.cluster.progress.begun
    failure = Raised(member="m2", step=1, micro_batch=0, signature="s", traceback="")
    cluster.happen(agent, ev.NoticeCame(node="node2", notice=failure))
    assert agent.end is None


def test_long_traceback_fits_into_what_agents_may_say() -> None:
    cluster = running()
    cluster.say("m0", Failed(step=5, micro_batch=3, signature="s", traceback="\x01" * 10_000_000 + "the end"))
    told = [c.message for c in cluster.agents["node0"].done if isinstance(c, TellNodes)]
    heard = NOTICE.decode(NOTICE.encode(told[-1]))
    assert isinstance(heard, Raised) and heard.traceback.endswith("the end")


# ---- the end


def finish(cluster: Cluster, member: str) -> None:
    agent = cluster.of(member)
    cluster.say(member, Finished(step=9, digest="d"))
    cluster.happen(agent, ev.WorkerDied(member=member, source="pidfd", at_s=cluster.now))
    cluster.happen(agent, ev.WorkerExited(member=member, exit_code=0))
    cluster.answer()


def test_first_to_finish_frees_the_members_of_all_nodes() -> None:
    cluster = running()
    cluster.say("m1", Finished(step=9, digest="d"))
    for agent in cluster.living:
        assert [c.message for c in agent.done if isinstance(c, Tell)][-1] == am.EndReached()


def test_every_node_ends_well_when_its_own_members_have_left() -> None:
    cluster = running()
    for member in ALL:
        finish(cluster, member)
    assert {(agent.end.code, agent.end.everywhere) for agent in cluster.living if agent.end} == {(0, False)}
    assert all(agent.end is not None for agent in cluster.living)
    assert cluster.agents["node2"].core.cluster.view.generation == 1  # type: ignore[union-attr]


def test_members_of_two_nodes_that_end_with_different_parameters_fail_the_job_on_all_nodes() -> None:
    cluster = running()
    cluster.say("m1", Finished(step=9, digest="d"))
    cluster.say("m2", Finished(step=9, digest="other"))
    ends = [agent.end for agent in cluster.living]
    assert [end.code for end in ends if end is not None] == [1, 1, 1]
    assert all("m1 has the digest d, m2 has other" in end.sentence for end in ends if end is not None)


def test_node_that_has_finished_first_ends_with_1_when_a_slower_one_has_another_result() -> None:
    """It had ended with 0 by then: two commands of one job, of which one said that all was well."""
    cluster = running()
    finish(cluster, "m0")
    assert cluster.agents["node0"].end is None
    assert [log.fields["members"] for log in cluster.agents["node0"].logged("await_digests")] == [["m1", "m2"]]
    finish(cluster, "m1")
    cluster.say("m2", Finished(step=9, digest="other"))
    assert [agent.end.code for agent in cluster.living if agent.end] == [1, 1, 1]


def finished_first(cluster: Cluster) -> Agent:
    """A node that waits for the digest of m2 only."""
    finish(cluster, "m0")
    cluster.say("m1", Finished(step=9, digest="d"))
    agent = cluster.agents["node0"]
    assert agent.end is None
    return agent


def test_node_that_has_finished_first_ends_well_with_the_last_digest() -> None:
    agent = finished_first(cluster := running())
    cluster.say("m2", Finished(step=9, digest="d"))
    assert agent.end == End(code=0, sentence="finished after step 0", everywhere=False)


def test_node_that_has_finished_first_waits_for_nobody_who_is_dead() -> None:
    agent = finished_first(cluster := running())
    cluster.die("m2")
    assert agent.end is not None
    assert agent.end.code == 0


def test_node_that_has_finished_first_waits_for_no_node_that_does_not_answer() -> None:
    agent = finished_first(cluster := running())
    cluster.happen(agent, ev.LinkChanged(node="node2", up=False, reason="silence"), NOW)
    assert agent.end is not None
    assert agent.end.code == 0


def test_node_that_has_finished_first_waits_for_no_node_that_has_left() -> None:
    agent = finished_first(cluster := running())
    cluster.happen(agent, ev.NoticeCame(node="node2", notice=Left()), NOW)
    assert agent.end is not None
    assert agent.end.code == 0


def test_node_that_has_finished_first_ends_alone_after_a_while_and_names_whose_digest_is_missing() -> None:
    agent = finished_first(cluster := running(exit_timeout_s=30.0))
    cluster.tick(29.0)
    assert agent.end is None
    cluster.tick(1.0)
    assert agent.end is not None
    assert agent.end.code == 0
    [late] = agent.logged("digests_missing")
    assert late.say.startswith("the parameters of m2 at the end are not known after 30 s")


def test_digest_told_while_two_agents_did_not_hear_each_other_is_told_again() -> None:
    cluster = running()
    cluster.cut.add(frozenset(("node0", "node1")))
    finish(cluster, "m0")
    cluster.cut.clear()
    one, other = cluster.agents["node0"], cluster.agents["node1"]
    one.core.cluster.peers.nodes["node1"].linked = other.core.cluster.peers.nodes["node0"].linked = False
    cluster.link(one, other)
    cluster.say("m1", Finished(step=9, digest="other"))
    assert [agent.end.code for agent in cluster.living if agent.end] == [1, 1, 1]


def test_node_that_came_too_late_ends_well_when_the_others_have_finished() -> None:
    cluster = running()
    cluster.kill_node("node2")
    cluster.lease_goes("node2")
    late = cluster.add("node2")
    finish(cluster, "m0")
    finish(cluster, "m1")
    assert [c.member for c in late.done if isinstance(c, Kill)] == ["m3"]
    cluster.happen(late, ev.WorkerDied(member="m3", source="pidfd", at_s=NOW), NOW)
    cluster.happen(late, ev.WorkerExited(member="m3", exit_code=-9), NOW)
    assert late.end is not None
    assert late.end.code == 0


def test_node_that_came_too_late_ends_well_when_the_others_have_left_their_loops_early() -> None:
    cluster = running()
    cluster.kill_node("node2")
    cluster.lease_goes("node2")
    late = cluster.add("node2")
    for member in ("m0", "m1"):  # a `break`: no end of the job is told
        agent = cluster.of(member)
        cluster.happen(agent, ev.WorkerDied(member=member, source="pidfd", at_s=cluster.now))
        cluster.happen(agent, ev.WorkerExited(member=member, exit_code=0))
        cluster.answer()
    cluster.hello("m3")
    assert late.end is not None
    assert (late.end.code, late.end.sentence) == (0, "the job ended before this node had joined")


def test_node_without_workers_left_ends_by_itself_and_the_others_go_on() -> None:
    cluster = running(max_restarts=0)
    cluster.die("m1")
    end = cluster.agents["node1"].end
    assert end is not None
    assert (end.code, end.everywhere) == (1, False)
    assert cluster.agents["node0"].end is None


def test_stopping_one_agent_leaves_the_others_running() -> None:
    cluster = running()
    agent = cluster.agents["node1"]
    cluster.happen(agent, ev.StopAsked(code=143, sentence="stopped by SIGTERM"), NOW)
    cluster.happen(agent, ev.WorkerDied(member="m1", source="pidfd", at_s=NOW), NOW)
    cluster.answer()
    assert cluster.agents["node0"].end is None
    assert cluster.agents["node0"].members == ("m0", "m2")


def preempt(cluster: Cluster, name: str) -> Agent:
    agent = cluster.agents[name]
    cluster.happen(agent, ev.StopAsked(code=143, sentence="stopped by SIGTERM"))
    cluster.answer()
    return agent


def test_a_preempted_node_hands_over_at_the_end_of_the_step_then_leaves() -> None:
    cluster = running()
    agent = preempt(cluster, "node1")
    assert [c.member for c in agent.done if isinstance(c, Tell) and isinstance(c.message, Drain)] == ["m1"]
    assert agent.end is None
    cluster.die("m1", exit_code=1)
    assert agent.end is not None and (agent.end.code, agent.end.everywhere) == (143, False)
    assert cluster.agents["node0"].members == ("m0", "m2")
    assert not [c for c in agent.done if isinstance(c, TakeNumber)], "it starts nobody in its place"


def test_a_preempted_node_waits_for_the_end_of_a_step_for_some_seconds_only() -> None:
    cluster = running()
    agent = preempt(cluster, "node1")
    cluster.tick(4.9)
    assert agent.end is None
    cluster.tick(0.2)
    assert agent.end is not None and agent.end.code == 143


def test_a_preempted_node_with_all_members_hands_over_to_who_is_only_on_the_way() -> None:
    cluster = running()
    for name, member in (("node1", "m1"), ("node2", "m2")):
        assert member in cluster.agents[name].members
        cluster.die(member, exit_code=-9)
    assert cluster.agents["node0"].members == ("m0",)
    agent = preempt(cluster, "node0")
    assert agent.end is None
    assert [c.member for c in agent.done if isinstance(c, Tell) and isinstance(c.message, Drain)] == ["m0"]
    preempt(cluster, "node1")
    assert agent.end is None
    preempt(cluster, "node2")
    assert agent.end is not None and agent.end.code == 143


def test_a_second_signal_is_waited_with_for_nothing() -> None:
    cluster = running()
    preempt(cluster, "node1")
    assert preempt(cluster, "node1").end is not None


def test_where_all_nodes_are_told_to_go_the_job_is_stopped_at_once() -> None:
    cluster = running()
    for name in ("node0", "node1", "node2"):
        preempt(cluster, name)
    assert [agent.end.code for agent in cluster.agents.values() if agent.end is not None] == [143, 143, 143]


def test_a_node_that_still_hands_over_writes_the_last_checkpoint_too_once_the_others_are_told_to_go() -> None:
    cluster = a_pair(leave=LeaveTimes(last_checkpoint_s=30.0))
    one, other = preempt(cluster, "node0"), cluster.agents["node1"]
    cluster.tick(0.6)  # no other node was told the same at the same time
    assert [c.message for c in one.done if isinstance(c, Tell)][-1] == Drain()
    preempt(cluster, "node1")
    for agent in (one, other):
        assert [c.message for c in agent.done if isinstance(c, Tell)][-1] == am.WriteLast()
        assert agent.end is None
    cluster.say("m1", am.CheckpointEnded(step=1, last=True))
    assert [agent.end.code for agent in (one, other) if agent.end is not None] == [143, 143]


def test_a_node_that_has_handed_over_leaves_the_last_checkpoint_to_the_others() -> None:
    cluster = a_pair(leave=LeaveTimes(last_checkpoint_s=30.0))
    agent = preempt(cluster, "node0")
    cluster.tick(0.6)
    cluster.happen(agent, ev.WorkerDied(member="m0", source="pidfd", at_s=NOW))
    cluster.answer()
    assert agent.end is None
    preempt(cluster, "node1")
    assert agent.end is not None and agent.end.code == 143


def test_an_interrupt_of_the_operator_is_no_notice() -> None:
    cluster = running()
    agent = cluster.agents["node1"]
    cluster.happen(agent, ev.StopAsked(code=130, sentence="stopped by SIGINT"))
    assert agent.end is not None


# ---- faults


@pytest.mark.parametrize("asked_at", ["node0", "node1"])
def test_fault_reaches_its_target_whatever_agent_is_asked(asked_at: str) -> None:
    cluster = running(armed=True)
    agent = cluster.agents[asked_at]
    _, taken, commands = agent.core.inject(grammar.parse("kill --target member:m1"))
    cluster.do(agent, commands)
    assert taken
    assert [c.member for c in cluster.agents["node1"].done if isinstance(c, Kill)] == ["m1"]


def test_node_as_a_target_kills_that_node_only() -> None:
    cluster = running(armed=True)
    agent = cluster.agents["node0"]
    _, taken, commands = agent.core.inject(grammar.parse("kill --target node:node2"))
    cluster.do(agent, commands)
    assert taken
    assert [a.name for a in cluster.living if any(isinstance(c, KillNode) for c in a.done)] == ["node2"]
    sentence, taken, _ = agent.core.inject(grammar.parse("kill --target node:node9"))
    assert (taken, sentence) == (False, "there is no node node9: there are node0, node1, node2")


def test_node_is_struck_in_a_phase_by_its_worker_that_gets_there() -> None:
    cluster = running(armed=True)
    agent = cluster.agents["node0"]
    cluster.do(agent, agent.core.inject(grammar.parse("kill --target node:node2 --at step=4,phase=commit"))[2])
    told = [c.message for c in cluster.agents["node2"].done if isinstance(c, Tell)]
    fault = am.ArmFault(kind="kill", step=4, phase="commit", number=1)
    assert [message for message in told if isinstance(message, am.ArmFault)] == [fault]
    cluster.say("m2", Struck(number=1))
    assert [a.name for a in cluster.living if any(isinstance(c, KillNode) for c in a.done)] == ["node2"]


def test_worker_of_an_unarmed_run_can_not_take_its_node_along() -> None:
    cluster = running()
    cluster.say("m2", Struck(number=1))
    assert not any(isinstance(c, KillNode) for c in cluster.agents["node2"].done)


def test_plain_scripts_may_end_on_one_node_after_the_other() -> None:
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    for n in range(3):
        agent = cluster.agents[f"node{n}"]
        cluster.happen(agent, ev.WorkerDied(member=f"m{n}", source="pidfd", at_s=NOW), NOW)
        cluster.happen(agent, ev.WorkerExited(member=f"m{n}", exit_code=0), NOW)
        cluster.kill_node(f"node{n}")
        cluster.lease_goes(f"node{n}")
    assert [agent.end.code for agent in cluster.agents.values() if agent.end] == [0, 0, 0]
    assert cluster.agents["node2"].end is not None


def test_node_that_learns_from_the_store_that_the_work_is_done_ends_well() -> None:
    cluster = running()
    cluster.kill_node("node2")
    cluster.lease_goes("node2")
    late = cluster.add("node2")
    cluster.happen(late, ev.EndStands(over=Over(code=0, sentence="finished after step 9", detail="")), NOW)
    assert [c.member for c in late.done if isinstance(c, Kill)] == ["m3"]


def test_place_that_waits_for_a_number_keeps_no_node_from_ending_with_the_job() -> None:
    cluster = Cluster()
    away, other = [cluster.add(name, workers=2, nodes_min=2, nodes_max=2) for name in ("a", "b")]
    cluster.hello("m0", "m1", "m2", "m3")
    cluster.commit(0, "m0", "m1", "m2", "m3")
    cluster.kill_node(other.name)
    cluster.lease_goes(other.name)
    cluster.happen(away, ev.WorkerDied(member="m0", source="pidfd", at_s=NOW))
    cluster.happen(away, ev.WorkerExited(member="m0", exit_code=-9))
    assert away.done[-1] == TakeNumber()
    cluster._asked.clear()  # the last node has taken the job's keys along: nobody gives numbers any more
    cluster.happen(away, ev.EndStands(over=Over(code=0, sentence="finished after step 9", detail="")))
    cluster.happen(away, ev.WorkerDied(member="m1", source="pidfd", at_s=NOW))
    assert away.end is None
    cluster.happen(away, ev.WorkerExited(member="m1", exit_code=1))
    assert away.end is not None
    assert away.end.code == 0


# ---- a store that has lost its data


def test_a_node_ends_with_a_sentence_where_others_have_begun_the_job_anew() -> None:
    cluster = Cluster()
    agents = [cluster.add(name) for name in ("a", "b", "c")]
    node = agents[0]
    roster = node.core.cluster.roster
    assert roster is not None
    cluster.happen(node, ev.RosterStands(roster=roster))
    assert node.end is None
    cluster.happen(node, ev.RosterStands(roster=replace(roster, nodes=roster.nodes[1:])))
    assert node.end is not None
    assert (node.end.code, node.end.everywhere) == (1, False)
    assert "the store has lost its data, and b, c have begun the job anew" in node.end.sentence


def test_a_node_that_finds_a_store_without_a_history_leaves_it_to_those_who_know_the_job() -> None:
    cluster = Cluster()
    cluster.settle_s = 6.0
    node = cluster.add("a", nodes_min=1, nodes_max=2, last_call_s=0.0)
    cluster.do(node, node.core.on_tick(NOW + 5.9))
    assert not [c for c in node.done if isinstance(c, PutRoster)]
    cluster.do(node, node.core.on_tick(NOW + 6.1))
    cluster.do(node, node.core.on_tick(NOW + 6.2))
    assert [c for c in node.done if isinstance(c, PutRoster)]


def test_no_roster_is_made_beside_a_node_that_knows_one() -> None:
    cluster = Cluster()
    node = cluster.add("a", nodes_min=2, nodes_max=2, last_call_s=0.0)
    record = NodeRecord(name="b", incarnation=7, workers=1, has_roster=True)
    cluster.happen(node, ev.NodeCame(record=record))
    assert not [c for c in node.done if isinstance(c, PutRoster)]
    cluster.happen(node, ev.NodeCame(record=replace(record, incarnation=8, has_roster=False)))  # it has begun anew
    assert [c for c in node.done if isinstance(c, PutRoster)]


def test_a_node_whose_roster_was_not_put_leaves_the_store_to_those_who_know_the_job_then_tries_again() -> None:
    cluster = Cluster()
    node = cluster.add("a", nodes_min=1, nodes_max=2, last_call_s=0.0)
    node.core.handle(ev.RosterStands(roster=None), NOW)
    cluster.do(node, node.core.on_tick(NOW + 5.9))
    assert not [c for c in node.done if isinstance(c, PutRoster)]
    cluster.do(node, node.core.on_tick(NOW + 6.1))
    cluster.do(node, node.core.on_tick(NOW + 6.2))
    assert [c for c in node.done if isinstance(c, PutRoster)]


def stand_stopped(cluster: Cluster, member: str, for_s: float) -> None:
    """The agent of this member's node sees it stopped, four times a second."""
    thread = ev.SeenThread(spot=ThreadStatus(count=1, place=Station.COMPUTING, step=1), starved_s=0.0)
    looked = ev.Looked(seen=(ev.Seen(member=member, loop=thread, engine=thread, stopped=True),))
    for _ in range(int(4 * for_s)):
        cluster.tick(0.25)
        cluster.happen(cluster.of(member), looked)
        cluster.answer()


def test_who_comes_to_wait_for_a_stopped_member_of_another_node_joins_when_it_goes_on() -> None:
    cluster = running()
    cluster.commit(1, *ALL, holders={"0": ("m2",)})
    stand_stopped(cluster, "m2", 4.0)
    agent = cluster.agents["node0"]
    assert (
        "m2 of node2 stands still, and the job's state is nowhere else"
        in describe(agent.core, "job", NOW)["reasons"][-1]
    )
    cluster.die("m0")
    cluster.hello("m3")
    cluster.die("m3")
    assert "it waited for the state of m2: no restart is used up" in agent.logged("replace")[-1].say
    assert agent.core.cluster.workers.restarts_used == 1, "of m0, which was a member"
    cluster.hello("m4")
    stand_stopped(cluster, "m2", 6.0)
    assert len(agent.logged("spared_there")) == 1 and views_of(cluster) == {("m1", "m2")}
    cluster.tick(3.0)  # node2 says no more that it stands still
    assert views_of(cluster) == {("m1", "m2", "m4")}


def test_nobody_waits_for_a_stopped_member_that_is_dead() -> None:
    cluster = running()
    cluster.commit(1, *ALL, holders={"0": ("m2", "m1"), "1": ("m2",)})
    stand_stopped(cluster, "m2", 4.0)
    cluster.die("m0")
    cluster.hello("m3")
    assert views_of(cluster) == {("m1", "m2")}
    cluster.die("m2")
    assert views_of(cluster) == {("m1", "m3")}


def test_node_that_others_may_have_left_behind_ends_where_the_store_has_forgotten_them() -> None:
    cluster = running()
    isolated = cluster.agents["node2"]
    cluster.deaf.add("node2")
    cluster.cut_off("node2")
    cluster.happen(isolated, ev.StoreForgot(nodes=frozenset({"node0", "node1"})))
    assert isolated.end is None, "they live, and put what they know"
    cluster.happen(isolated, ev.StoreForgot(nodes=frozenset()))
    assert isolated.end is not None
    assert (isolated.end.code, isolated.end.everywhere) == (1, False)
    assert "the store has lost its data, and node0, node1 may have gone on" in isolated.end.sentence


@pytest.mark.parametrize(("looks_after_s", "ends"), [(0.3, False), (5.0, True)])
def test_node_goes_on_in_a_store_without_data_where_the_others_were_linked_until_they_died(
    looks_after_s: float, ends: bool
) -> None:
    cluster = running()
    last = cluster.agents["node2"]
    cluster.kill_node("node0")
    cluster.happen(last, ev.Looked(seen=()), NOW)
    cluster.happen(last, ev.Looked(seen=()), NOW + looks_after_s)  # after long: this node stood still itself
    cluster.kill_node("node1")
    cluster.happen(last, ev.StoreForgot(nodes=frozenset()))
    assert (last.end is not None) == ends


def test_node_that_was_left_out_ends_where_the_store_has_forgotten_how_the_others_went_on() -> None:
    cluster = running()
    out = cluster.agents["node2"]
    cluster.far_from_store.add("node2")
    cluster.cut_off("node2")
    assert views_of(cluster) == {("m0", "m1"), ALL}
    cluster.cut.clear()
    for name in ("node0", "node1"):
        cluster.link(out, cluster.agents[name])
    assert out.members == ("m0", "m1")
    assert [c.view.ids for c in out.done if isinstance(c, Remember)] == [("m0", "m1")]
    cluster.kill_node("node0")
    cluster.happen(out, ev.StoreForgot(nodes=frozenset()))
    assert out.end is None, "node1 is there, and knows"
    cluster.kill_node("node1")
    cluster.happen(out, ev.StoreForgot(nodes=frozenset()))
    assert out.end is not None and "the store has lost its data, and node0, node1 may have gone on" in out.end.sentence


def test_a_view_that_is_told_and_cannot_be_taken_yet_brings_nobody_back_in_touch() -> None:
    """Before the first commit a view counts once the store says it."""
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    last = cluster.agents["node2"]
    cluster.cut_off("node2")
    for name in ("node0", "node1"):
        cluster.happen(last, ev.LinkChanged(node=name, up=True, reason="its agent answers again"))
        first = View(generation=1, members=(Member(id="m0", node="node0", address="unix:m0"),), reason="first")
        cluster.happen(last, ev.NoticeCame(node=name, notice=Stands(view=first)))
        cluster.happen(last, ev.LinkChanged(node=name, up=False, reason="port closed", closed=True))
    assert not last.members
    cluster.happen(last, ev.StoreForgot(nodes=frozenset()))
    assert last.end is not None and "node0, node1 may have gone on" in last.end.sentence


@pytest.mark.parametrize("told", ["by one that is linked", "by one whose link was lost since", "by nobody"])
def test_no_first_view_is_put_beside_one_of_which_another_tells(told: str) -> None:
    """The store has lost it, and it puts it again: this node was not there when it stood."""
    cluster = Cluster()
    for name in ("node0", "node1", "node2"):
        cluster.add(name)
    late = cluster.agents["node2"]
    stood = View(generation=1, members=(Member(id="m0", node="node0", address="unix:m0"),), reason="first")
    if told != "by nobody":
        cluster.happen(late, ev.NoticeCame(node="node0", notice=Stands(view=stood)))
    if told == "by one whose link was lost since":
        lose_link(cluster, "node2", "node0")
        cluster.link(late, cluster.agents["node0"])
    cluster.hello(*ALL)
    assert any(isinstance(c, Propose) for c in late.done) == (told != "by one that is linked")


def test_node_ends_in_a_store_without_data_where_the_other_was_never_reached() -> None:
    cluster = Cluster()
    cluster.cut.add(frozenset(("node0", "node1")))
    for name in ("node0", "node1"):
        cluster.add(name, nodes_min=2, nodes_max=2)
    last = cluster.agents["node0"]
    cluster.happen(last, ev.StoreForgot(nodes=frozenset({"node1"})))
    assert last.end is None
    cluster.happen(last, ev.StoreForgot(nodes=frozenset()))
    assert last.end is not None and "node1 may have gone on" in last.end.sentence


def test_what_the_network_has_held_of_another_brings_it_not_back_in_touch() -> None:
    cluster = running()
    last = cluster.agents["node2"]
    view = last.core.cluster.view
    assert view is not None
    for name in ("node0", "node1"):
        lose_link(cluster, "node2", name)
        cluster.agents[name].alive = False
        cluster.happen(last, ev.LinkChanged(node=name, up=True, reason="its agent answers again"))
        cluster.happen(last, ev.NoticeCame(node=name, notice=Stands(view=view)))
        cluster.happen(last, ev.LinkChanged(node=name, up=False, reason="port closed", closed=True))
    cluster.happen(last, ev.StoreForgot(nodes=frozenset()))
    assert last.end is not None and "may have gone on" in last.end.sentence


def test_node_that_has_heard_since_which_view_stands_goes_on_in_a_store_without_data() -> None:
    cluster = running()
    last = cluster.agents["node2"]
    for name in ("node0", "node1"):
        lose_link(cluster, "node2", name)
        lose_link(cluster, name, "node2")
        cluster.link(last, cluster.agents[name])
    assert last.members == ALL
    cluster.kill_node("node0")
    cluster.kill_node("node1")
    cluster.happen(last, ev.StoreForgot(nodes=frozenset()))
    assert last.end is None
