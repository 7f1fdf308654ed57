"""One start of a node: the agent's core with production's shells around it, and the worker processes that it owns."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from elastrain.launcher.agent.command_runner import CommandRunner, NodeParts
from elastrain.launcher.agent.node_end import NodeEnd
from elastrain.launcher.agent.worker_monitor import _LOOK_EVERY_S
from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.nodes.peer_agents import AgentPort, ClusterAccess, PeerAgents
from elastrain.launcher.shared.job_values import JobConfig, Life, Start, Tell
from elastrain.launcher.shared.times import LeaveTimes
from elastrain.launcher.start.registration import _HISTORY
from elastrain.launcher.store.lone_registry import LoneRegistry
from elastrain.launcher.store.port import MemoryStore
from elastrain.launcher.store.presence import Presence
from elastrain.launcher.store.registry import LEASE_S
from elastrain.protocol.agent_messages import FromWorker, ToWorker
from tests.sim.job.clock import Process
from tests.sim.job.etcd import Client
from tests.sim.job.links import SimLinks
from tests.sim.job.member import MemberProcess
from tests.sim.job.network import Stream
from tests.sim.job.shells import NoLoop, building
from tests.support.agents import job_config

if TYPE_CHECKING:
    from tests.sim.job.world import World

STOP_GRACE_S = 2.0
FIRST_COME_S = 0.6


class AgentLog:
    """`EventLog`: what is worth a line of the transcript."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent

    def write(self, event: str, **fields: Any) -> None:
        if event in _TOLD:
            self._agent.world.say(f"{self._agent.name}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))
        if event == "straggler":
            self._agent.life.checks.ends_a_straggler(fields["member"])
        if event == "link":
            self._agent.linked_since_s.pop(fields["node"], None)
            if fields["up"]:
                self._agent.linked_since_s[fields["node"]] = self._agent.world.clock.now
        if event == "node_dead" and fields["reason"].startswith("its lease"):
            self._agent.life.checks.takes_for_dead(self._agent, fields["node"], fields["incarnation"])


_TOLD = {"view", "parked", "unparked", "death", "exit", "replace", "no_restart", "refused", "node_dead", "kill", "end"}
_TOLD |= {
    "store_away",
    "store_back",
    "end_suspect",
    "lease_gone",
    "link",
    "hang",
    "hang_over",
    "hang_spared",
    "last_checkpoint",
    "leaving",
    "shares",
    "straggler",
}


def config_of(world: World, name: str, incarnation: int, life: Life) -> JobConfig:
    sizes = world.schedule
    # After everything was lost the job goes on with the nodes that are left.
    nodes_min = sizes.nodes if life.number == 1 else 1
    return job_config(
        node=name, incarnation=incarnation, workers=sizes.workers, nodes_min=nodes_min, nodes_max=world.nodes_max,
        max_restarts=100, last_call_s=1.0, join_timeout_s=15.0, life=life,
        leave=LeaveTimes(last_checkpoint_s=30.0 if sizes.checkpoint_every else 0.0),
    )  # fmt: skip


class AgentProcess(Process):
    """`in_loop` does something as its event loop would: then what has become due follows."""

    def __init__(self, world: World, name: str, incarnation: int, life: Life) -> None:
        super().__init__(world.clock, name)
        self.world, self.name, self.incarnation, self.started_s = world, name, incarnation, world.clock.now
        self.life = world.lives.of(life.number)
        self.core = Core(config_of(world, name, incarnation, life), (), choose=lambda members: members[-1])
        self.client = Client(world.etcd, self, late_s=3.0 if name == world.slow_node else 0.0)
        self.client.before_commit = lambda: world.others_first(self)
        self.links: SimLinks = None  # type: ignore[assignment]  # made by PeerAgents
        self.presence: Presence | None = None
        self.workers = SimWorkers(self)
        self.peers: PeerAgents | None = None
        self.linked_since_s: dict[str, float] = {}
        self._tick_s: float | None = None
        self.vanished = False
        """With its machine: nobody says that its port is closed."""
        log: Any = AgentLog(self)
        self._make_parts(log)

    def _make_parts(self, log: Any) -> None:
        world, workers = self.world, self.workers
        registry: Any = None
        with building(self):
            if self.core.cluster.config.alone:
                registry = LoneRegistry(MemoryStore(world.clock.monotonic), self.life.scope)
            else:
                store: Any = self.client
                life = self.core.cluster.config.life
                access = ClusterAccess(
                    job=self.life.scope, life=life, secret=b"", store=store, host="127.0.0.1", key_ttl_s=3600.0
                )
                nodes = lambda: self.core.cluster.peers.nodes  # noqa: E731
                port = AgentPort(
                    happen=self.happen,
                    hear_workers=workers.hear_all,
                    nodes=nodes,
                    let_read=lambda name, _connection: f"{name}: nobody has a disk of its own here",
                )
                record = self.core.cluster.peers.record
                loop: Any = NoLoop()
                self.peers = PeerAgents(loop, log, access, record, port)
                registry = self.peers.registry
        processes: Any = workers
        self.end = NodeEnd(processes, registry, log, incarnation=self.incarnation, stop_grace_s=STOP_GRACE_S)
        self.registry = registry
        # Parts that are no part of what is simulated (faults on request) are not there.
        lookout = SimpleNamespace(folder="stacks", take_stacks=lambda reason: {})
        missing: dict[str, Any] = dict.fromkeys(NodeParts.__dataclass_fields__)
        parts = NodeParts(
            **{
                **missing,
                "workers": processes,
                "peers": self.peers,
                "registry": registry,
                "end": self.end,
                "lookout": lookout,
            }
        )
        state: Any = SimpleNamespace(stale=False)
        self.runner = CommandRunner(self.core, parts, log, state, shares_screen=False)

    def begin(self) -> None:
        record = self.peers.record if self.peers is not None else self.core.cluster.peers.record
        if self.peers is not None:
            with building(self):
                self.registry.put_record(record)
        # As `enrol` does: the first nodes come to a store that was made for the job.
        is_new = self.clock.now > FIRST_COME_S and self.world.etcd.memory.list("").revision < _HISTORY
        self.happen(ev.NodeRegistered(record=record, settle_s=2 * LEASE_S if is_new else 0.0))
        self.later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        """As its lookout does."""
        seen = tuple(process.seen() for process in self.workers.living if process.has_said_hello)
        if seen:
            self.happen(ev.Looked(seen=seen))
        self.later(_LOOK_EVERY_S, self._look)

    # ---- its loop

    def happen(self, event: ev.Event) -> None:
        self.in_loop(lambda: self.runner.happen(event))

    def in_loop(self, act: Callable[[], None]) -> None:
        if not self.alive:
            return
        act()
        self.life.checks.agent(self)
        if self.end.is_over:
            self.leave()
        else:
            self._look_ahead()

    def _look_ahead(self) -> None:
        dues = (self.core.deadlines.next_s(), self.registry.next_deadline_s(), self.end.next_deadline_s())
        due_s = min((due for due in dues if due is not None), default=None)
        if due_s is not None and (self._tick_s is None or due_s < self._tick_s):
            self._tick_s = due_s
            self.later(max(due_s - self.clock.now, 0.0) + 1e-6, lambda: self._tick(due_s))

    def _tick(self, due_s: float) -> None:
        if self._tick_s == due_s:
            self._tick_s = None
        now = self.clock.now

        def tick() -> None:
            self.registry.on_tick(now)
            self.end.on_tick(now)
            self.runner.queue.add(self.core.on_tick(now))

        self.in_loop(tick)

    # ---- its end

    def leave(self) -> None:
        """All its workers are gone: it takes leave of the store, then of the others."""
        if not self.alive:
            return
        if self.peers is not None:
            self.peers.close()
        self.alive = False
        self.world.say(f"{self.name} has ended")
        self.world.lives.ended(self)


@dataclass(kw_only=True, eq=False)
class Handle:
    """A worker as its agent holds it."""

    process: MemberProcess
    words: Stream
    """From it."""
    orders: Stream
    """To it."""
    running: bool = True
    is_open: bool = True
    """Its channel."""


class SimWorkers:
    """`WorkerProcesses`: starts members, hears them, and sees them die."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent, self._world = agent, agent.world
        self.handles: dict[str, Handle] = {}

    @property
    def running(self) -> list[str]:
        return [member for member, handle in self.handles.items() if handle.running]

    @property
    def living(self) -> list[MemberProcess]:
        return [handle.process for handle in self.handles.values() if handle.process.alive]

    # ---- the port

    def start(self, command: Start) -> None:
        agent = self._agent
        roster = agent.core.cluster.roster
        if roster is not None:
            agent.life.begin(roster, agent.core.cluster.config.life)
        process = MemberProcess(self._world, agent, command.member)
        hear = lambda message: self._hear(command.member, message)  # noqa: E731
        self.handles[command.member] = Handle(
            process=process,
            words=Stream(self._world.network, agent.node, agent, hear),
            orders=Stream(self._world.network, agent.node, process, process.hear),
        )
        agent.happen(ev.WorkerStarted(member=command.member, pid=1))
        process.start()

    def tell(self, command: Tell) -> None:
        handle = self.handles.get(command.member)
        if handle is not None and handle.is_open:
            handle.orders.send(command.message)

    def restore_priority(self, member: str, *, ahead: bool = False) -> None: ...

    def signal(self, member: str, number: int) -> None:
        handle = self.handles.get(member)
        if handle is None or not handle.process.alive:
            return
        process, code = handle.process, -int(number)
        if number == signal.SIGKILL:
            process.die(code)
        else:  # a process that stands still does not hear it
            process.later(self._world.clock.soon(), lambda: process.die(code))

    def signal_all(self, number: int) -> None:
        for member in list(self.handles):
            self.signal(member, number)

    def hear_all(self) -> None:
        for handle in list(self.handles.values()):
            if handle.is_open:
                handle.words.drain()

    # ---- what happens

    def say(self, member: str, message: FromWorker) -> None:
        handle = self.handles[member]
        if handle.is_open:
            handle.words.send(message)

    def _hear(self, member: str, message: FromWorker) -> None:
        if self.handles[member].is_open:
            self._agent.happen(ev.WorkerSpoke(member=member, message=message))

    def ended(self, process: MemberProcess, code: int) -> None:
        """The process is gone: its mutex may tell first, then the kernel."""
        agent, soon = self._agent, self._world.clock.soon()
        if code and process.has_said_hello and self._world.clock.rng.random() < 0.7:
            agent.later(soon, lambda: self._mutex_broke(process.id))
        agent.later(soon + self._world.clock.soon(), lambda: self._reaped(process.id, code))

    def _mutex_broke(self, member: str) -> None:
        self.hear_all()
        self._agent.happen(ev.MutexBroke(member=member, at_s=self._agent.clock.now))

    def _reaped(self, member: str, code: int) -> None:
        handle = self.handles[member]
        self.hear_all()
        self._agent.happen(ev.WorkerDied(member=member, source="pidfd", at_s=self._agent.clock.now))
        handle.running = False
        if handle.is_open:
            handle.is_open = False
            self._agent.happen(ev.ChannelClosed(member=member))
        self._agent.happen(ev.WorkerExited(member=member, exit_code=code))

    def tell_at_once(self, member: str, message: ToWorker) -> None:
        self.handles[member].process.hear(message)
