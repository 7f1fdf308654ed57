"""Agents' production cores in virtual time: nodes and workers are killed, links fall silent, the store goes away.

Members are symbolic (who holds what, which step), but decide with the runtime's own `recovery.decide`. The store is
`JobKeys` over memory; leases, watches and links are modelled with delays, each in its own order. One generator chooses
everything, so a seed replays a schedule exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elastrain.agent_messages import Failed, Hello, LostState, NewView, Progress, Suspect
from elastrain.launcher.core import Core
from elastrain.launcher.core import events as ev
from elastrain.launcher.notices import Notice, Over
from elastrain.launcher.store import MemoryStore
from elastrain.launcher.values import (
    Command,
    End,
    Kill,
    NodeRecord,
    Propose,
    PutBegun,
    PutRecord,
    PutRoster,
    PutSpec,
    Start,
    TakeNumber,
    Tell,
    TellNodes,
)
from elastrain.launcher.views import JobKeys, decode_roster, decode_view
from elastrain.placement import Placement, next_roles, target
from elastrain.recovery import decide
from elastrain.values import Contribution, Record, Report, Shape, ShardShape, Unrecoverable
from elastrain.world import Member, View
from tests.support.agents import job_config

LEASE_S = 3.0
SILENCE_S = 2.5
DISTRUST_S = 6.0
STEP_S = 0.2
FAULTS_UNTIL_S = 25.0
QUIET_S = 45.0
"""Faults are over and everything is mended: by then each agent has ended or trains."""
GOES_ON_S = 10.0
"""An agent goes on if its job has committed a step within this time."""
SHARDS = 3


class Violation(AssertionError):  # noqa: N818  named as what it is: a broken invariant
    """What must hold does not."""


@dataclass(frozen=True, kw_only=True)
class Play:
    """What is drawn for one schedule."""

    nodes: int
    workers: int
    backups: int
    faults: int
    one_host: bool
    burst: bool
    """Most faults come close upon another one."""


def draw(seed: int) -> Play:
    rng = random.Random(f"play {seed}")
    return Play(
        nodes=rng.choice((2, 2, 3, 3, 4)),
        workers=rng.choice((1, 1, 1, 2)),
        backups=rng.choice((0, 1, 1, 2)),
        faults=rng.choice((1, 2, 3, 4, 6, 9)),
        one_host=rng.random() < 0.5,
        burst=rng.random() < 0.5,
    )


def shape_of(play: Play) -> Shape:
    shard = ShardShape(size_bytes=8, lanes=(0,))
    return Shape(runs=1, blocks=1, shards=(shard,) * SHARDS, backups=play.backups)


@dataclass(eq=False)
class SimWorker:
    """A member as far as views and holders go."""

    id: str
    agent: SimAgent
    member: Member
    alive: bool = True
    view: View | None = None
    newest: View | None = None
    recovered: bool = False
    committed: int = -1
    base: Placement | None = None
    now: Placement = ()
    parameters: int = -2
    held: dict[int, int] = field(default_factory=dict)
    """Shard -> the step that its state is of."""
    kept: set[int] = field(default_factory=set)
    """Shards whose gradient of the step after `committed` is here."""
    told: Any = None

    def report(self) -> Report:
        record = None if self.committed < 0 else record_of(self.committed)
        held = tuple((s, v, (self.committed + 1,) if s in self.kept else ()) for s, v in sorted(self.held.items()))
        return Report(
            committed=self.committed,
            record=record,
            base=self.base,
            parameters=(self.parameters,) * SHARDS,
            held=held,
            begun=self.committed + 1 if self.base is not None else -1,
            finishing=False,
            pending=(),
            fixed=0,
            own=((),),
            folded=(),
        )


def record_of(step: int) -> Record:
    return Record(step=step, generation=1, contribution=Contribution(), square_norm=0.0, skipped=False, switch=False)


class SimAgent:
    """One start of a node: its core, and what it has seen of the store."""

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        play = world.play
        config = job_config(
            node=name, incarnation=incarnation, workers=play.workers, nodes_min=1 if play.nodes == 1 else play.nodes,
            nodes_max=play.nodes, max_restarts=1000, last_call_s=1.0, join_timeout_s=15.0,
        )  # fmt: skip
        self.core = Core(config, (), choose=lambda members: members[-1])
        self.world, self.name, self.incarnation = world, name, incarnation
        self.keys = JobKeys(world.store, "job")
        self.seen: dict[str, NodeRecord] = {}
        self.workers: dict[str, SimWorker] = {}
        self.alive = True
        self.last_s: dict[Any, float] = {}
        """Channel -> when its last message comes: each is in order."""
        self.linked: set[tuple[str, int]] = set()

    def knows(self, other: SimAgent) -> bool:
        known = self.core.cluster.peers.nodes.get(other.name)
        return known is not None and known.record.incarnation == other.incarnation

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.incarnation


class World:
    """The nodes of one job, its store, and the faults."""

    def __init__(self, seed: int, play: Play | None = None) -> None:
        self.play = play or draw(seed)
        self.rng = random.Random(seed)
        self.shape = shape_of(self.play)
        self.store = MemoryStore()
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.agents: dict[str, SimAgent] = {}
        """Node -> its newest start."""
        self.past: list[SimAgent] = []
        self.records: dict[str, NodeRecord] = {}
        self.cut: set[frozenset[str]] = set()
        self.slow = {name for name in (f"node{n}" for n in range(self.play.nodes)) if self.rng.random() < 0.1}
        """Nodes that hear late of what is in the store; links are quicker."""
        self.broken: list[tuple[SimWorker, SimWorker]] = []
        """Pairs of members whose own link is gone for good, though their agents reach each other."""
        self.away = False
        self.distrust_until_s = 0.0
        self.highest, self.last_commit_s = -1, 0.0
        self.log: list[str] = []
        for index in range(self.play.nodes):
            self.at(self.rng.uniform(0, 0.5), lambda index=index: self.start_node(f"node{index}"))  # type: ignore[misc]
        self._draw_faults()
        self._draw_broken_links(random.Random(f"links {seed}"))

    # ---- time

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.count, act))

    def run(self) -> None:
        """Play to the end. Raises Violation."""
        self.at(STEP_S, self._step)
        until_s = FAULTS_UNTIL_S + QUIET_S
        while self.heap and self.heap[0][0] <= until_s:
            self.now, _, act = heapq.heappop(self.heap)
            act()
            for agent in self._living():
                due_s = agent.core.deadlines.next_s()
                if due_s is not None and due_s <= self.now:
                    self.do(agent, agent.core.on_tick(self.now))
        self._check_end()

    def say(self, what: str) -> None:
        self.log.append(f"{self.now:8.3f}  {what}")

    def in_order(self, agent: SimAgent, channel: Any, delay_s: float, act: Callable[[], None]) -> None:
        """Deliver to the agent, behind all that came through this channel before."""
        at_s = max(self.now + delay_s, agent.last_s.get(channel, 0.0) + 1e-6)
        agent.last_s[channel] = at_s
        self.at(at_s - self.now, lambda: act() if agent.alive else None)

    def soon(self) -> float:
        return self.rng.choice((0.001, 0.01, 0.05)) * self.rng.uniform(0.5, 2.0)

    # ---- nodes

    def _living(self) -> list[SimAgent]:
        return [agent for agent in self.agents.values() if agent.alive]

    def start_node(self, name: str, tries: int = 0) -> None:
        """What `enrol` does: wait until the name is free, clear what a dead job left, take an incarnation."""
        there = self.agents.get(name)
        if there is not None and there.alive:
            return
        keys = JobKeys(self.store, "job")
        began = self.store.get(keys.prefix + "roster") is not None
        if self.away or name in self.records or (began and not self.records and tries < 12):
            self.at(0.5, lambda: self.start_node(name, tries + (not self.records)))
            return
        if began and not self.records:
            self.say("the keys of the dead job are cleared")
            keys.remove_all()
            self.highest = -1
        agent = SimAgent(self, name, keys.take_number("incarnations", at_least=1))
        self.say(f"{name} starts, incarnation {agent.incarnation}")
        if there is not None:
            self.past.append(there)
        self.agents[name] = agent
        self.happen(agent, ev.NodeRegistered(record=agent.core.cluster.peers.record))
        self._put_record(agent, agent.core.cluster.peers.record)
        for other in self._living():
            if other is not agent:
                self.at(self.soon() + 0.05, lambda other=other: self._meet(agent, other))  # type: ignore[misc]

    def _put_record(self, agent: SimAgent, record: NodeRecord) -> None:
        if agent.alive:
            self.records[agent.name] = record
            self._news()

    def _meet(self, one: SimAgent, other: SimAgent) -> None:
        if not (one.alive and other.alive) or other.key in one.linked:
            return
        if not (one.knows(other) and other.knows(one)) or frozenset((one.name, other.name)) in self.cut:
            self.at(0.2, lambda: self._meet(one, other))
            return
        for here, there in ((one, other), (other, one)):
            here.linked.add(there.key)
            self._link(here, there, up=True)

    def _link(self, here: SimAgent, there: SimAgent, *, up: bool, closed: bool = False, delay_s: float = 0.001) -> None:
        def act() -> None:
            if not here.knows(there):
                return
            say = here.core.handle(ev.LinkChanged(node=there.name, up=up, reason="link", closed=closed), self.now)
            self.do(here, say)

        self.in_order(here, ("link", there.key), delay_s, act)

    def kill_node(self, name: str, again_s: float | None = None) -> None:
        """`again_s`: when somebody starts it again; None: perhaps, some time."""
        agent = self.agents.get(name)
        if agent is None or not agent.alive:
            return
        self.say(f"FAULT {name} is killed")
        self._gone(agent)
        for worker in agent.workers.values():
            self._dies(worker, told=False)
        if again_s is not None or self.rng.random() < 0.7:
            self.at(self.rng.uniform(0, 5) if again_s is None else again_s, lambda: self.start_node(name))

    def _gone(self, agent: SimAgent, *, left: bool = False) -> None:
        agent.alive = False
        closed = left or self.rng.random() < 0.7
        for other in self._living():
            if agent.key in other.linked:
                other.linked.discard(agent.key)
                delay_s = 0.02 if closed else SILENCE_S + self.rng.uniform(0, 0.3)
                self._link(other, agent, up=False, closed=closed, delay_s=delay_s)
        self._lease_ends(agent, 0.0 if left else LEASE_S + self.rng.uniform(0, 1))

    def _lease_ends(self, agent: SimAgent, delay_s: float) -> None:
        def act() -> None:
            if self.away or self.now < self.distrust_until_s:
                self._lease_ends(agent, max(0.5, self.distrust_until_s - self.now))
            elif self.records.get(agent.name, agent.core.cluster.peers.record).incarnation == agent.incarnation:
                self.records.pop(agent.name, None)
                self._news()

        self.at(delay_s, act)

    # ---- the store

    def _news(self) -> None:
        """Everybody hears of what the store holds now, a little later, and in order."""
        items = {item.key.rpartition("/")[2]: item.value for item in self.store.list("/elastrain/job/").items}
        records = dict(self.records)
        for agent in self._living():
            slow_s = self.rng.uniform(0, 3) if agent.name in self.slow else 0.0
            self.in_order(agent, "news", self.soon() + slow_s, lambda agent=agent: self._hear(agent, items, records))  # type: ignore[misc]

    def _hear(self, agent: SimAgent, items: dict[str, bytes], records: dict[str, NodeRecord]) -> None:
        """As `PeerAgents._on_news` does."""
        if self.away:
            self.in_order(agent, "news", 0.5, lambda: self._hear(agent, items, records))
            return
        others = {name: record for name, record in records.items() if name != agent.name}
        gone = [name for name in agent.seen if name not in others]
        for name, record in others.items():
            if agent.seen.get(name) != record:
                self.happen(agent, ev.NodeCame(record=record))
        agent.seen = others
        if "begun" in items:
            self.happen(agent, ev.FirstCommitStands())
        if "spec" in items:
            self.happen(agent, ev.SpecStands(spec={"backups": self.play.backups}))
        if "view" in items:
            self.happen(agent, ev.ViewStands(view=decode_view(items["view"])))
        if "roster" in items:
            self.happen(agent, ev.RosterStands(roster=decode_roster(items["roster"])))
        if "end" in items:
            self.happen(agent, ev.EndStands(over=Over(**JobKeys.read(self._item("end")))))
        for name in gone:
            self.happen(agent, ev.LeaseEnded(node=name))

    def _item(self, name: str) -> Any:
        return self.store.get(f"/elastrain/job/{name}")

    def _ask(self, agent: SimAgent, command: Command) -> None:
        if self.away:
            if isinstance(command, Propose):
                self.in_order(
                    agent,
                    "answers",
                    1.0,
                    lambda: self.happen(agent, ev.ProposalAnswered(view=None)),
                )
            else:
                self.at(0.5, lambda: self._ask(agent, command) if agent.alive else None)
            return
        keys, core, answer = agent.keys, agent.core, self.soon()
        match command:
            case Propose():
                self._check_proposal(agent, command.view)
                stands = keys.put_view(command.view)
                self.in_order(
                    agent,
                    "answers",
                    answer,
                    lambda: self.happen(agent, ev.ProposalAnswered(view=stands)),
                )
            case PutSpec():
                spec = keys.put_spec(command.spec)
                self.in_order(agent, "answers", answer, lambda: self.happen(agent, ev.SpecStands(spec=spec)))
            case PutRoster():
                roster = keys.put_roster(command.roster)
                self.in_order(
                    agent,
                    "answers",
                    answer,
                    lambda: self.happen(agent, ev.RosterStands(roster=roster)),
                )
            case TakeNumber():
                number = keys.take_number("members", at_least=core.cluster.first_unused_number())
                self.in_order(
                    agent,
                    "answers",
                    answer,
                    lambda: self.happen(agent, ev.NumberTaken(number=number)),
                )
            case PutBegun():
                keys.put_once("begun", {})
        self._news()

    # ---- commands

    def happen(self, agent: SimAgent, event: ev.Event) -> None:
        self.do(agent, agent.core.handle(event, self.now))

    def do(self, agent: SimAgent, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Propose() | PutSpec() | PutRoster() | TakeNumber() | PutBegun():
                    self.at(self.soon(), lambda command=command: self._ask(agent, command) if agent.alive else None)  # type: ignore[misc]
                case PutRecord():
                    self.at(self.soon(), lambda record=command.record: self._put_record(agent, record))  # type: ignore[misc]
                case TellNodes():
                    self._tell_nodes(agent, command.message, command.node)
                case Tell():
                    self._tell(agent, command)
                case Start():
                    self._start_worker(agent, command)
                case Kill():
                    self.say(f"{agent.name}: {command.reason}")
                    self._dies(agent.workers[command.member])
                case End():
                    self._end(agent, command)

    def _tell_nodes(self, agent: SimAgent, notice: Notice, node: str | None) -> None:
        for other in self._living():
            reached = other.key in agent.linked and frozenset((agent.name, other.name)) not in self.cut
            if reached and node in (None, other.name):
                act = lambda other=other: self.happen(other, ev.NoticeCame(node=agent.name, notice=notice))  # noqa: E731
                self.in_order(other, ("link", agent.key), self.soon(), act)

    def _end(self, agent: SimAgent, end: End) -> None:
        self.say(f"{agent.name} ends: {end.sentence}")
        if end.everywhere and end.code:
            self._check_false_end(end.sentence)
        for worker in agent.workers.values():
            self._dies(worker, told=False)
        if end.job_is_over and not self.away:
            agent.keys.put_once("end", {"code": end.code, "sentence": end.sentence, "detail": end.detail})
        self._gone(agent, left=True)
        self._news()

    # ---- members

    def _start_worker(self, agent: SimAgent, start: Start) -> None:
        member = Member(id=start.member, node=agent.name, address="x", incarnation=agent.incarnation)
        worker = agent.workers[start.member] = SimWorker(start.member, agent, member)
        self.at(self.rng.choice((0.2, 0.5, 3.0)), lambda: self._say_hello(worker))

    def _say_hello(self, worker: SimWorker) -> None:
        hello = Hello(member=worker.id, address="x", spec={"backups": self.play.backups})
        self._from_worker(worker, hello)

    def _from_worker(self, worker: SimWorker, message: Any) -> None:
        agent = worker.agent
        if worker.alive:
            act = lambda: self.happen(agent, ev.WorkerSpoke(member=worker.id, message=message))  # noqa: E731
            self.in_order(agent, ("worker", worker.id), 0.001, act)

    def _dies(self, worker: SimWorker, *, told: bool = True, code: int = -9) -> None:
        if not worker.alive:
            return
        worker.alive = False
        agent = worker.agent

        def act() -> None:
            self.happen(agent, ev.WorkerDied(member=worker.id, source="pidfd", at_s=self.now))
            self.happen(agent, ev.WorkerExited(member=worker.id, exit_code=code))

        if told:
            self.in_order(agent, ("worker", worker.id), self.soon(), act)
        for other in self._members():
            if worker.view is not None and other.view is not None and other.id in worker.view:
                same_host = self.play.one_host or other.agent is agent
                self._from_worker(other, Suspect(member=worker.id, reason="ended", dead=same_host))

    def _members(self) -> list[SimWorker]:
        return [worker for agent in self._living() for worker in agent.workers.values() if worker.alive]

    def _tell(self, agent: SimAgent, command: Tell) -> None:
        worker = agent.workers[command.member]
        if isinstance(command.message, NewView):
            view = command.message.view
            self.at(0.001, lambda: self._viewed(worker, view) if worker.alive else None)

    def _viewed(self, worker: SimWorker, view: View) -> None:
        if worker.newest is not None and view.generation <= worker.newest.generation:
            return
        if worker.id not in view:
            if worker.view is not None:
                self._dies(worker, code=1)
            return
        worker.newest = view
        if worker.view is None or set(worker.view.ids) - set(view.ids):
            self._switch(worker)

    def _switch(self, worker: SimWorker) -> None:
        worker.view, worker.recovered = worker.newest, False

    def _step(self) -> None:
        """Every group that is whole recovers, or commits a step."""
        self.at(STEP_S * self.rng.uniform(0.5, 1.5), self._step)
        by_id = {worker.id: worker for worker in self._members()}
        for view in {w.view.generation: w.view for w in by_id.values() if w.view is not None}.values():
            group = [by_id[m] for m in view.ids if m in by_id]
            for worker in group:  # left behind: one of its view has gone on
                ahead = any(o.view and o.view.generation > view.generation for o in group)
                if worker.view is view and ahead and worker.newest is not view:
                    self._switch(worker)
            here = [w for w in group if w.view is not None and w.view.generation == view.generation]
            if len(here) == len(view.ids) and self._reach_each_other(here):
                if all(worker.recovered for worker in here):
                    self._commit(view, here)
                else:
                    self._recover(view, here)

    def _reach_each_other(self, group: Sequence[SimWorker]) -> bool:
        names = {worker.agent.name for worker in group}
        apart = any(one in group and other in group for one, other in self.broken)
        return not apart and not any(pair <= names for pair in self.cut)

    def _recover(self, view: View, group: Sequence[SimWorker]) -> None:
        reports = {worker.id: worker.report() for worker in group}
        decision = decide(view, reports, self.shape)
        if isinstance(decision, Unrecoverable):
            self._check_false_end(decision.reason)
            for worker in group:
                self._from_worker(worker, LostState(sentence=decision.reason))
                self._dies(worker, code=1)
            return
        if decision.committed < self.highest - 1 and (decision.committed >= 0 or self.highest > 0):
            raise Violation(f"generation {view.generation} goes on from {decision.committed}, not {self.highest}")
        for worker in group:
            worker.committed = worker.parameters = decision.committed
            worker.base, worker.now, worker.recovered = decision.base, decision.now, True
            mine = [s for s, holders in enumerate(worker.now) if worker.id in holders.all]
            worker.held, worker.kept = dict.fromkeys(mine, worker.committed), set()

    def _commit(self, view: View, group: list[SimWorker]) -> None:
        now, step = group[0].now, group[0].committed + 1
        ready = {worker.id for worker in group}
        goal = target(now, self.shape.sizes, view.nodes, self.play.backups)
        shard = self.rng.randrange(SHARDS)
        moved = tuple(next_roles(h, goal[s], ready) if s == shard else h for s, h in enumerate(now))
        for worker in group:
            worker.kept = {s for s, h in enumerate(now) if worker.id in h.all}
        order = self.rng.sample(group, len(group))
        if self.rng.random() < 0.15 and self._victims_wait:  # somebody dies while some have passed and others have not
            self._victims_wait -= 1
            order = order[: self.rng.randint(0, len(order))]
            self.say(f"FAULT a member dies in the commit of step {step}")
            self.at(0.0, lambda: self._dies(self.rng.choice(group)))
        seen = all(w.newest is not None and w.newest.generation > view.generation for w in group)
        for worker in order:
            self.highest, self.last_commit_s = max(self.highest, step), self.now
            worker.committed = worker.parameters = step
            worker.base = worker.now = moved
            worker.held = {s: step for s, h in enumerate(moved) if worker.id in h.all}
            worker.kept = set()
            self._progress(worker, view)
            if seen:
                self._switch(worker)
        if len(order) < len(group):
            for worker in group:
                worker.recovered = False  # nobody gets on without the next view
            self.at(1.0, lambda: [self._switch(w) for w in group if w.view is view and w.alive] and None)

    def _progress(self, worker: SimWorker, view: View) -> None:
        holders = {str(s): h.all for s, h in enumerate(worker.now)}
        news = holders if holders != worker.told else None
        worker.told = holders
        self._from_worker(worker, Progress(step=worker.committed, holders=news))

    # ---- faults

    def _draw_faults(self) -> None:
        kinds = ("worker", "worker", "worker", "node", "node", "all nodes", "cut", "store", "commit", "raise")
        weights = (3, 3, 3, 3, 3, 2, 2, 1, 2, 1)
        self._victims_wait = 0
        at_s = self.rng.uniform(0.2, FAULTS_UNTIL_S - 8)
        for _ in range(self.play.faults):
            kind = self.rng.choices(kinds, weights)[0]
            self.at(at_s, lambda kind=kind: self._strike(kind))  # type: ignore[misc]
            close = self.rng.random() < (0.8 if self.play.burst else 0.3)
            at_s = at_s + self.rng.uniform(0, 4) if close else self.rng.uniform(0.2, FAULTS_UNTIL_S - 8)
            at_s = min(at_s, FAULTS_UNTIL_S - 8)

    def _strike(self, kind: str) -> None:
        workers, names = self._members(), [agent.name for agent in self._living()]
        match kind:
            case "worker" | "raise" if workers:
                victim = self.rng.choice(workers)
                self.say(f"FAULT {victim.id} of {victim.agent.name} is killed ({kind})")
                began = victim.committed >= 0
                if kind == "raise" and began:
                    failed = Failed(step=victim.committed + 1, micro_batch=0, signature=victim.id, traceback="")
                    self._from_worker(victim, failed)
                self._dies(victim, code=1 if kind == "raise" and began else -9)
            case "node" if names:
                self.kill_node(self.rng.choice(names))
            case "all nodes":
                again_s = self.rng.choice((None, 2.0))
                for name in names:
                    delay_s = self.rng.choice((0.0, self.rng.uniform(0, 2)))
                    self.at(delay_s, lambda name=name: self.kill_node(name, again_s))  # type: ignore[misc]
            case "cut" if len(names) > 1:
                self._cut(frozenset(self.rng.sample(names, 2)), self.rng.uniform(0.5, 8))
            case "store":
                self._store_goes(self.rng.uniform(0.5, 7))
            case "commit":
                self._victims_wait += 1

    def _cut(self, pair: frozenset[str], for_s: float) -> None:
        one, other = (self.agents[name] for name in sorted(pair))
        self.say(f"FAULT {one.name} and {other.name} do not hear each other for {for_s:.1f} s")
        self.cut.add(pair)

        def silent() -> None:
            if pair in self.cut and other.key in one.linked:
                for here, there in ((one, other), (other, one)):
                    if here.alive and there.key in here.linked:
                        here.linked.discard(there.key)
                        self._link(here, there, up=False, delay_s=self.rng.uniform(0, 0.4))
                self._suspect(one, other)

        def healed() -> None:
            self.cut.discard(pair)
            self._meet(one, other)

        self.at(SILENCE_S, silent)
        self.at(for_s, healed)

    def _suspect(self, one: SimAgent, other: SimAgent) -> None:
        for here, there in ((one, other), (other, one)):
            for worker in [w for w in here.workers.values() if w.alive and w.view is not None]:
                for peer in [w for w in there.workers.values() if w.alive and w.view is not None]:
                    self._from_worker(worker, Suspect(member=peer.id, reason="silence"))

    def _draw_broken_links(self, rng: random.Random) -> None:
        for _ in range(rng.choice((0, 0, 1, 2))):
            self.at(rng.uniform(0.2, FAULTS_UNTIL_S - 8), lambda: self._break_link(rng))

    def _break_link(self, rng: random.Random) -> None:
        members = [w for w in self._members() if w.view is not None]
        if len(members) < 2:
            return
        one, other = rng.sample(members, 2)
        self.say(f"FAULT {one.id} and {other.id} have lost their link")
        self.broken.append((one, other))
        self._accuse(one, other, mutual=rng.random() < 0.7)

    def _accuse(self, one: SimWorker, other: SimWorker, *, mutual: bool) -> None:
        """Again and again, as `RECOVERY_DEADLINE_S` has it, while both are members and live."""
        if not (one.alive and other.alive and one.agent.alive and other.agent.alive):
            return
        if one.view is not None and other.view is not None and other.id in one.view and one.id in other.view:
            for by, of in ((one, other), (other, one))[: 1 + mutual]:
                self._from_worker(by, Suspect(member=of.id, reason="no link"))
        self.at(3.0, lambda: self._accuse(one, other, mutual=mutual))

    def _store_goes(self, for_s: float) -> None:
        self.say(f"FAULT the store is away for {for_s:.1f} s")
        self.away = True
        for agent in self._living():
            self.happen(agent, ev.StoreWentAway(problem="away"))

        def back() -> None:
            self.away = False
            self.distrust_until_s = self.now + (DISTRUST_S if for_s > LEASE_S else 0.0)
            for agent in self._living():
                self.happen(agent, ev.StoreCameBack())

        self.at(for_s, back)

    # ---- what must hold

    def _newest(self) -> View | None:
        item = self._item("view")
        return decode_view(item.value) if item is not None else None

    def _check_proposal(self, agent: SimAgent, view: View) -> None:
        newest = self._newest()
        if not view.members and (newest is None or newest.generation < view.generation):
            self._check_false_end(view.reason)

    def _check_false_end(self, why: str) -> None:
        """Nobody ends a job while living members of the newest view hold everything."""
        if "raised the same exception" in why or (self.highest < 0 and self._newest() is None):
            return
        view = self._newest()
        members = [w for w in self._members() if view is not None and w.id in view]
        if not members:
            return
        top = max(worker.committed for worker in members)
        able = {s for w in members for s, v in w.held.items() if v == top or (v == top - 1 and s in w.kept)}
        if top >= 0 and len(able) == SHARDS:
            who = ", ".join(worker.id for worker in members)
            raise Violation(f"a job whose state is whole (held by {who}) is ended: {why}")

    def _check_end(self) -> None:
        waiting = [agent for agent in self._living() if agent.core.shutdown.end is None]
        if waiting and self.now - self.last_commit_s > GOES_ON_S:
            told = [
                f"{a.name} parked: {a.core.parking.parked.reason}" if a.core.parking.parked else f"{a.name} waits"
                for a in waiting
            ]
            raise Violation(f"stands still since {self.last_commit_s:.1f} s: {'; '.join(told)}")
        parked = [agent for agent in waiting if agent.core.parking.parked is not None]
        if parked:
            raise Violation(f"{parked[0].name} is parked though all is mended: {parked[0].core.parking.parked}")
        for agent in waiting:
            left_out = agent.core.cluster.view is None or not any(
                m.node == agent.name for m in agent.core.cluster.view.members
            )
            if left_out:
                raise Violation(f"{agent.name} has not come in: its view is {agent.core.cluster.view}")


def outcome(world: World) -> str:
    """How the schedule ended: "goes on", "ended" or "lost" (all nodes, with nobody left to say anything)."""
    if any(agent.alive for agent in world.agents.values()):
        return "goes on"
    return "ended" if any(agent.core.shutdown.end is not None for agent in world.agents.values()) else "lost"
