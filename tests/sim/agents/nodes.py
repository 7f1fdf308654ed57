"""Nodes start, meet, are cut off from one another, end and are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import End
from elastrain.launcher.shared.notices import Notice
from elastrain.launcher.store.job_keys import JobKeys
from tests.sim.agents.actors import SimAgent
from tests.sim.agents.schedule import LEASE_S, SILENCE_S

if TYPE_CHECKING:
    from tests.sim.agents.world import World


class SimNodes:
    """Nodes and the links between their agents."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cut: set[frozenset[str]] = set()

    def start_node(self, name: str, tries: int = 0) -> None:
        """What `enrol` does: wait until the name is free, clear what a dead job left, take an incarnation."""
        there = self.world.agents.get(name)
        if there is not None and there.alive:
            return
        keys = JobKeys(self.world.store.memory, "job")
        began = self.world.store.memory.get(keys.prefix + "roster") is not None
        if (
            self.world.store.away
            or name in self.world.store.records
            or (began and not self.world.store.records and tries < 12)
        ):
            self.world.at(0.5, lambda: self.start_node(name, tries + (not self.world.store.records)))
            return
        if began and not self.world.store.records:
            self.world.say("the keys of the dead job are cleared")
            keys.remove_all()
            self.world.members.highest = -1
            self.world.members.finishing = []
        agent = SimAgent(self.world, name, keys.take_number("incarnations", at_least=1))
        self.world.say(f"{name} starts, incarnation {agent.incarnation}")
        if there is not None:
            self.world.past.append(there)
        self.world.agents[name] = agent
        self.world.happen(agent, ev.NodeRegistered(record=agent.core.cluster.peers.record))
        self.world.store.put_record(agent, agent.core.cluster.peers.record)
        for other in self.world.living():
            if other is not agent:
                self.world.at(self.world.soon() + 0.05, lambda other=other: self.meet(agent, other))  # type: ignore[misc]

    def meet(self, one: SimAgent, other: SimAgent) -> None:
        if not (one.alive and other.alive) or other.key in one.linked:
            return
        if not (one.knows(other) and other.knows(one)) or frozenset((one.name, other.name)) in self.cut:
            self.world.at(0.2, lambda: self.meet(one, other))
            return
        for here, there in ((one, other), (other, one)):
            here.linked.add(there.key)
            self.link(here, there, up=True)

    def link(self, here: SimAgent, there: SimAgent, *, up: bool, closed: bool = False, delay_s: float = 0.001) -> None:
        def act() -> None:
            if not here.knows(there):
                return
            say = here.core.handle(ev.LinkChanged(node=there.name, up=up, reason="link", closed=closed), self.world.now)
            self.world.do(here, say)

        self.world.in_order(here, ("link", there.key), delay_s, act)

    def kill_node(self, name: str, again_s: float | None = None) -> None:
        """`again_s`: when somebody starts it again; None: perhaps, some time."""
        agent = self.world.agents.get(name)
        if agent is None or not agent.alive:
            return
        self.world.say(f"FAULT {name} is killed")
        self.go(agent)
        for worker in agent.workers.values():
            self.world.members.die(worker, told=False)
        if again_s is not None or self.world.rng.random() < 0.7:
            self.world.at(self.world.rng.uniform(0, 5) if again_s is None else again_s, lambda: self.start_node(name))

    def go(self, agent: SimAgent, *, left: bool = False) -> None:
        agent.alive = False
        closed = left or self.world.rng.random() < 0.7
        for other in self.world.living():
            if agent.key in other.linked:
                other.linked.discard(agent.key)
                delay_s = 0.02 if closed else SILENCE_S + self.world.rng.uniform(0, 0.3)
                self.link(other, agent, up=False, closed=closed, delay_s=delay_s)
        self.world.store.end_lease(agent, 0.0 if left else LEASE_S + self.world.rng.uniform(0, 1))

    def tell(self, agent: SimAgent, notice: Notice, node: str | None) -> None:
        for other in self.world.living():
            reached = other.key in agent.linked and frozenset((agent.name, other.name)) not in self.cut
            if reached and node in (None, other.name):
                act = lambda other=other: self.world.happen(other, ev.NoticeCame(node=agent.name, notice=notice))  # noqa: E731
                self.world.in_order(other, ("link", agent.key), self.world.soon(), act)

    def end(self, agent: SimAgent, end: End) -> None:
        self.world.say(f"{agent.name} ends: {end.sentence}")
        if end.everywhere and end.code:
            self.world.checks.false_end(end.sentence)
        for worker in agent.workers.values():
            self.world.members.die(worker, told=False)
        if end.job_is_over and not self.world.store.away:
            agent.keys.put_once("end", {"code": end.code, "sentence": end.sentence, "detail": end.detail})
        self.go(agent, left=True)
        self.world.store.spread()

    def cut_off(self, pair: frozenset[str], for_s: float) -> None:
        one, other = (self.world.agents[name] for name in sorted(pair))
        self.world.say(f"FAULT {one.name} and {other.name} do not hear each other for {for_s:.1f} s")
        self.cut.add(pair)

        def silent() -> None:
            if pair in self.cut and other.key in one.linked:
                for here, there in ((one, other), (other, one)):
                    if here.alive and there.key in here.linked:
                        here.linked.discard(there.key)
                        self.link(here, there, up=False, delay_s=self.world.rng.uniform(0, 0.4))
                self.world.members.suspect(one, other)

        def healed() -> None:
            self.cut.discard(pair)
            self.meet(one, other)

        self.world.at(SILENCE_S, silent)
        self.world.at(for_s, healed)
