"""The nodes of one job in virtual time: the clock, the cores, and what their commands do."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from typing import Any

from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import (
    Command,
    End,
    Kill,
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
from tests.sim.agents.actors import SimAgent
from tests.sim.agents.checks import SimChecks
from tests.sim.agents.faults import random_faults
from tests.sim.agents.members import SimMembers
from tests.sim.agents.nodes import SimNodes
from tests.sim.agents.schedule import FAULTS_UNTIL_S, QUIET_S, STEP_S, Play, draw, shape_of
from tests.sim.agents.store import SimStore


class World:
    """`faults` says what goes wrong."""

    def __init__(self, seed: int, play: Play | None = None, faults: Callable[[World], None] = random_faults) -> None:
        self.seed, self.play = seed, play or draw(seed)
        self.rng = random.Random(seed)
        self.shape = shape_of(self.play)
        self.now = 0.0
        self.heap: list[tuple[float, int, Callable[[], None]]] = []
        self.count = 0
        self.log: list[str] = []
        self.agents: dict[str, SimAgent] = {}
        """Node -> its newest start."""
        self.past: list[SimAgent] = []
        self.store = SimStore(self)
        self.nodes, self.members, self.checks = SimNodes(self), SimMembers(self), SimChecks(self)
        for index in range(self.play.nodes + self.play.spares):
            start = lambda index=index: self.nodes.start_node(f"node{index}")  # noqa: E731
            self.at(self.rng.uniform(0, 0.5), start)  # type: ignore[misc]
        faults(self)

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        self.count += 1
        heapq.heappush(self.heap, (self.now + delay_s, self.count, act))

    def run(self) -> None:
        """Play to the end. Raises Violation."""
        self.at(STEP_S, self.members.step)
        until_s = FAULTS_UNTIL_S + QUIET_S
        while self.heap and self.heap[0][0] <= until_s:
            self.now, _, act = heapq.heappop(self.heap)
            act()
            for agent in self.living():
                due_s = agent.core.deadlines.next_s()
                if due_s is not None and due_s <= self.now:
                    self.do(agent, agent.core.on_tick(self.now))
        self.checks.at_the_end()

    def say(self, what: str) -> None:
        self.log.append(f"{self.now:8.3f}  {what}")

    def in_order(self, agent: SimAgent, channel: Any, delay_s: float, act: Callable[[], None]) -> None:
        """Deliver to the agent, behind all that came through this channel before."""
        at_s = max(self.now + delay_s, agent.last_s.get(channel, 0.0) + 1e-6)
        agent.last_s[channel] = at_s
        self.at(at_s - self.now, lambda: act() if agent.alive else None)

    def soon(self) -> float:
        return self.rng.choice((0.001, 0.01, 0.05)) * self.rng.uniform(0.5, 2.0)

    def living(self) -> list[SimAgent]:
        return [agent for agent in self.agents.values() if agent.alive]

    def happen(self, agent: SimAgent, event: ev.Event) -> None:
        self.do(agent, agent.core.handle(event, self.now))

    def do(self, agent: SimAgent, commands: Sequence[Command]) -> None:
        for command in commands:
            match command:
                case Propose() | PutSpec() | PutRoster() | TakeNumber() | PutBegun():
                    self.at(
                        self.soon(), lambda command=command: self.store.ask(agent, command) if agent.alive else None
                    )  # type: ignore[misc]
                case PutRecord(if_lost=True):
                    pass  # no key is lost here
                case PutRecord():
                    self.at(self.soon(), lambda record=command.record: self.store.put_record(agent, record))  # type: ignore[misc]
                case TellNodes():
                    self.nodes.tell(agent, command.message, command.node)
                case Tell():
                    self.members.hear(agent, command)
                case Start():
                    self.members.start(agent, command)
                case Kill():
                    self.say(f"{agent.name}: {command.reason}")
                    self.members.die(agent.workers[command.member])
                case End():
                    self.nodes.end(agent, command)


def outcome(world: World) -> str:
    """How the schedule ended: "goes on", "ended" or "lost" (all nodes, with nobody left to say anything)."""
    if any(agent.alive for agent in world.agents.values()):
        return "goes on"
    return "ended" if any(agent.core.shutdown.end is not None for agent in world.agents.values()) else "lost"
