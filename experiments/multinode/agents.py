"""Agents' cores on one real etcd: how long does a change of the view take with 256 nodes, and how much does it write?

`python -m experiments.multinode.agents [--nodes N] [--record]`. The README has the keys.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from elastrain.base.event_loop import EventLoop
from elastrain.job.world import View
from elastrain.launcher.core import Core
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import (
    Command,
    NodeRecord,
    Propose,
    PutBegun,
    PutDue,
    PutRecord,
    PutRoster,
    PutSpec,
    Roster,
    Start,
    TakeNumber,
    TellNodes,
)
from elastrain.launcher.simulated.embedded_etcd import EmbeddedEtcd
from elastrain.launcher.store.etcd import EtcdStore
from elastrain.launcher.store.etcd_config import EtcdConfig
from elastrain.launcher.store.job_keys import JobKeys, encode_record
from elastrain.launcher.store.port import Change, StoreError
from elastrain.launcher.store.registry import LEASE_S
from elastrain.launcher.store.store_thread import Inbox, StoreThread
from elastrain.protocol.agent_messages import Hello, Progress
from elastrain.protocol.codec import decoder_of
from experiments.harness import Reach, add_record_flag, record, report
from tests.support.agents import job_config

REACHES = {"view_change_256_s": Reach(limit=1)}
WAIT_S = 400.0
TICK_S = 0.05
decode_view, decode_record, decode_roster = decoder_of(View), decoder_of(NodeRecord), decoder_of(Roster)
"""The agents of other machines remember nothing for each other."""
HOLDERS = {"0": ("m0", "m1", "m2")}


class Agent:
    """A core with its own client of etcd: a thread for its calls, and a watch of the job's keys."""

    def __init__(self, cluster: Cluster, number: int, nodes: int) -> None:
        self.name, self._cluster = f"node{number:03}", cluster
        config = job_config(
            node=self.name, incarnation=number + 1, workers=1, nodes_min=nodes, nodes_max=nodes, max_restarts=1000,
            last_call_s=600.0, join_timeout_s=WAIT_S,
        )  # fmt: skip
        self.core = Core(config, (), choose=lambda members: members[-1])
        self.store = EtcdStore(EtcdConfig(endpoints=(cluster.endpoint,)))
        self.keys = JobKeys(self.store, "job")
        self.calls = StoreThread(self.store, cluster.inbox)
        self.alive, self.busy_s, self.calling_s = True, 0.0, 0.0
        self.record_revision = 0

    @property
    def record(self) -> NodeRecord:
        return self.core.cluster.peers.record

    @property
    def members(self) -> tuple[str, ...]:
        view = self.core.cluster.view
        return view.ids if view is not None else ()

    def follow(self, revision: int) -> None:
        """Watch the job's keys from a revision on."""
        take = lambda change: self._cluster.inbox.post(lambda: self._hear(change))  # noqa: E731
        self.store.watch(self.keys.prefix, revision, take)

    def happen(self, event: ev.Event) -> None:
        """Let the core decide about an event, and carry out its commands."""
        if not self.alive:
            return
        self._cluster.happened += 1
        began_s = time.thread_time()
        commands = self.core.handle(event, time.monotonic())
        self.busy_s += time.thread_time() - began_s
        self._cluster.commands.extend((self, command) for command in commands)

    def tick(self, now: float) -> None:
        """Let the core handle the deadlines that have passed."""
        due_s = self.core.deadlines.next_s()
        if not self.alive or due_s is None or due_s > now:
            return
        began_s = time.thread_time()
        commands = self.core.on_tick(now)
        self.busy_s += time.thread_time() - began_s
        self._cluster.commands.extend((self, command) for command in commands)

    def _hear(self, change: Any) -> None:
        """Turn a change of the store into an event, as `PeerAgents` does."""
        if not isinstance(change, Change):
            raise RuntimeError(f"the watch of {self.name} broke: {change}")
        began_s = time.thread_time()
        event = self._event_of(change)
        self.busy_s += time.thread_time() - began_s
        if event is not None:
            self.happen(event)

    def _event_of(self, change: Change) -> ev.Event | None:
        kind, _, name = change.key.removeprefix(self.keys.prefix).partition("/")
        if kind == "nodes" and name != self.name:
            gone = change.value is None
            return ev.LeaseEnded(node=name) if gone else ev.NodeCame(record=decode_record(change.value or b""))
        if kind == "view" and change.value is not None:
            return ev.ViewStands(view=decode_view(change.value))
        if kind == "roster" and change.value is not None:
            return ev.RosterStands(roster=decode_roster(change.value))
        return ev.FirstCommitStands() if kind == "begun" else None

    def ask(self, work: Callable[[], Any], event: Callable[[Any], ev.Event] | None = None) -> None:
        """Make a call of etcd in this agent's thread; the answer comes as an event."""

        def answered(answer: Any) -> None:
            self._cluster.open_calls -= 1
            if isinstance(answer, StoreError):
                raise answer
            if event is not None:
                self.happen(event(answer))

        def timed(_: Any) -> Any:
            began_s = time.thread_time()
            try:
                return work()
            finally:
                self.calling_s += time.thread_time() - began_s

        self._cluster.open_calls += 1
        self.calls.call(timed, answered)

    def close(self) -> None:
        self.calls.close(5.0)
        self.store.close()


class Cluster:
    """All agents, in one process and one loop. Links between them are calls, and workers are answers."""

    def __init__(self, endpoint: str, nodes: int) -> None:
        self.endpoint, self.inbox = endpoint, Inbox()
        self.commands: deque[tuple[Agent, Command]] = deque()
        self.proposals = self.happened = self.open_calls = 0
        """Numbers of proposed views, of events, and of calls of etcd that are under way."""
        self._ticked_s = 0.0
        self._loop = EventLoop()
        self._loop.register(self.inbox.fd, lambda _events: self.inbox.deliver())
        self.agents = [Agent(self, number, nodes) for number in range(nodes)]

    def begin(self) -> None:
        """Register all nodes and link them."""
        first = self.agents[0]
        for agent in self.agents:
            first.store.commit(expect={}, put={agent.keys.node(agent.name): encode_record(agent.record)})
        revision = first.store.list(first.keys.prefix).revision
        for agent in self.agents:
            agent.follow(revision)
            for other in self.agents:
                if other is not agent:
                    agent.happen(ev.NodeCame(record=other.record))
                    agent.happen(ev.LinkChanged(node=other.name, up=True, reason="linked"))
        for agent in self.agents:
            agent.happen(ev.NodeRegistered(record=agent.record))

    def wait(self, reached: Callable[[], bool], what: str) -> None:
        """Serve all agents until it is reached. Raises RuntimeError."""
        until_s = time.monotonic() + WAIT_S
        while not reached():
            if time.monotonic() > until_s:
                raise RuntimeError(f"not within {WAIT_S:g} s: {what}")
            self._work()
            if not self.commands:
                self._loop.turn(time.monotonic() + TICK_S)
            now = time.monotonic()
            # The loop of one process would otherwise look at all deadlines for each change that one agent hears of.
            if now - self._ticked_s >= TICK_S:
                self._ticked_s = now
                for agent in self.agents:
                    agent.tick(now)

    def settle(self, until_s: float) -> None:
        """Serve all agents until this time, and then until nothing has happened for a moment."""
        happened, quiet_s = self.happened, until_s

        def is_quiet() -> bool:
            nonlocal happened, quiet_s
            now = time.monotonic()
            if self.commands or self.open_calls or self.happened != happened:
                happened, quiet_s = self.happened, now
            return now > max(until_s, quiet_s + 2 * TICK_S)

        self.wait(is_quiet, "quiet")

    def all_have(self, count: int) -> bool:
        """True if every living agent has adopted a view of so many members."""
        return all(len(agent.members) == count for agent in self.agents if agent.alive)

    def _work(self) -> None:
        for _ in range(len(self.commands)):
            agent, command = self.commands.popleft()
            if agent.alive:
                self._carry_out(agent, command)

    def _carry_out(self, agent: Agent, command: Command) -> None:
        keys = agent.keys
        match command:
            case TellNodes():
                for other in self.agents:
                    if other is not agent and command.node in (None, other.name):
                        other.happen(ev.NoticeCame(node=agent.name, notice=command.message))
            case Start():
                agent.happen(ev.WorkerStarted(member=command.member, pid=1))
                hello = Hello(member=command.member, address="x", spec={"seed": 0})
                agent.happen(ev.WorkerSpoke(member=command.member, message=hello))
            case Propose():
                self.proposals += 1
                agent.ask(lambda: keys.put_next_view(command.view), lambda view: ev.ProposalAnswered(view=view))
            case PutSpec():
                agent.ask(lambda: keys.put_spec(command.spec), lambda spec: ev.SpecStands(spec=spec))
            case PutRoster():
                agent.ask(lambda: keys.put_roster(command.roster), lambda roster: ev.RosterStands(roster=roster))
            case TakeNumber():
                least = agent.core.cluster.first_unused_number()
                agent.ask(lambda: keys.take_member(at_least=least), lambda number: ev.NumberTaken(number=number))
            case PutRecord(if_lost=False):
                value = encode_record(command.record)
                agent.ask(lambda: agent.store.commit(expect={}, put={keys.node(agent.name): value}))
            case PutDue() | PutBegun():
                agent.ask(lambda: keys.put_once("begun", {}))

    def close(self) -> None:
        for agent in self.agents:
            agent.close()
        self.inbox.close()
        self._loop.close()


def lose_node(cluster: Cluster, number: int, count: int) -> dict[str, float]:
    """End a node: the others find its port closed, and its key goes with its lease. Returns what the change took."""
    lost = cluster.agents[number]
    before = cluster.proposals, {agent.name: (agent.busy_s, agent.calling_s) for agent in cluster.agents}
    other = next(agent for agent in cluster.agents if agent is not lost)
    lost.alive = False
    revision = other.store.list(other.keys.prefix).revision
    began_s = time.monotonic()
    for agent in cluster.agents:
        agent.happen(ev.LinkChanged(node=lost.name, up=False, reason="port closed", closed=True))
    cluster.wait(lambda: cluster.all_have(count), f"a view of {count} members")
    took_s = time.monotonic() - began_s
    cluster.settle(began_s + LEASE_S)
    other.store.commit(expect={}, delete=[lost.keys.node(lost.name)])
    gone_s = time.monotonic()
    cluster.settle(gone_s + 1.0)
    puts = other.store.list(other.keys.prefix).revision - revision - 1
    spent = [
        (agent.busy_s - before[1][agent.name][0], agent.calling_s - before[1][agent.name][1])
        for agent in cluster.agents
    ]
    return {
        "s": took_s,
        "proposals": cluster.proposals - before[0],
        "puts": puts,
        "busiest_agent_s": max(deciding + calling for deciding, calling in spent),
        "deciding_s": sum(deciding for deciding, _ in spent),
        "calling_s": sum(calling for _, calling in spent),
        "settled_s": time.monotonic() - gone_s,
    }


def measured(nodes: int) -> dict[str, Any]:
    """Form the first view, and lose three nodes, one after the other."""
    with tempfile.TemporaryDirectory(prefix="agents-") as folder, ExitStack() as stack:
        etcd = EmbeddedEtcd(Path(folder) / "etcd")
        stack.callback(etcd.close)
        cluster = Cluster(etcd.endpoint, nodes)
        stack.callback(cluster.close)
        began_s = time.monotonic()
        cluster.begin()
        cluster.wait(lambda: cluster.all_have(nodes), "the first view")
        started_s = time.monotonic() - began_s
        for agent in cluster.agents:
            for member in list(agent.core.cluster.workers.by_id):
                agent.happen(ev.WorkerSpoke(member=member, message=Progress(step=0, holders=HOLDERS)))
        cluster.settle(time.monotonic() + 2.0)
        changes = [lose_node(cluster, nodes - 1 - lost, nodes - 1 - lost) for lost in range(3)]
    worst = max(changes, key=lambda change: change["s"])
    return {
        f"view_change_{nodes}_s": worst["s"],
        "puts_per_change": worst["puts"],
        "proposals_per_change": worst["proposals"],
        "busiest_agent_s": max(change["busiest_agent_s"] for change in changes),
        "all_agents_s": worst["deciding_s"] + worst["calling_s"],
        "settled_s": max(change["settled_s"] for change in changes),
        "view_changes_s": [change["s"] for change in changes],
        "first_view_s": started_s,
    }


def main() -> int:
    """Run the experiment, and print its figures. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.multinode.agents", description=__doc__)
    parser.add_argument("--nodes", type=int, default=256, help="agents on the one etcd")
    add_record_flag(parser)
    args = parser.parse_args()
    figures = measured(args.nodes)
    if args.record:
        record("multinode", figures, quick=True, settings={"nodes": args.nodes})
    return 0 if report(figures, REACHES if args.nodes == 256 else {}) else 1


if __name__ == "__main__":
    sys.exit(main())
