"""Agents' production cores over a store that works exactly as long as the modelled quorum of their hosts does.

A node and its host are lost together, one at a time. The host comes back as a new instance, and its node registers once
the store works. An election of etcd's leader keeps the store away for a moment.
"""

from __future__ import annotations

from dataclasses import replace

from elastrain.launcher.core import agent_events as ev
from tests.sim.agents import World as AgentsWorld
from tests.sim.agents.schedule import DISTRUST_S, FAULTS_UNTIL_S, LEASE_S, draw
from tests.sim.quorum.model import TICK_S, Plant, QuorumError
from tests.sim.quorum.model import World as QuorumWorld

LOSSES_FROM_S, APART_S = 9.0, 12.0
AWAY_MAX_S = 5.0
"""Longest time without a working quorum after the loss of one host."""


class AgentsOverQuorum(AgentsWorld):
    """One schedule. `run` raises Violation of the agents, and QuorumError of the quorum."""

    def __init__(self, seed: int, plant: Plant | None = None) -> None:
        play = replace(draw(seed), nodes=3 + seed % 2, workers=1, backups=2, faults=0)
        self.quorum = QuorumWorld(seed, named=3, spare=play.nodes - 3, plant=plant)
        self.longest_away_s = 0.0
        self._away_since_s: float | None = 0.0
        self._election_until_s = 0.0
        super().__init__(seed, play, faults=lambda _: None)
        self.store.away = True  # until the quorum is founded
        self.at(0.0, self._turn)
        at_s = LOSSES_FROM_S + self.rng.uniform(0, 2)
        while at_s < FAULTS_UNTIL_S:
            self.at(at_s, self._lose_one)
            at_s += APART_S + self.rng.uniform(0, 4)

    def _lose_one(self) -> None:
        living = [index for index in range(self.play.nodes) if self._is_up(index)]
        index, back_s = self.rng.choice(living), self.rng.uniform(0.5, 4.0)
        if self.rng.random() < 0.5:  # it ran the leader
            self._election_until_s = self.now + self.rng.uniform(0.5, 1.5)
        self.quorum.lose(self.quorum.hosts[index])
        self.nodes.kill_node(f"node{index}", back_s + 0.5)
        self.at(back_s, lambda: self.quorum.come_back(self.quorum.hosts[index]))

    def _is_up(self, index: int) -> bool:
        agent = self.agents.get(f"node{index}")
        return agent is not None and agent.alive and self.quorum.hosts[index].alive

    def _turn(self) -> None:
        self.quorum.turn()
        works = any(self.quorum.working(cluster) for cluster in self.quorum.clusters.values())
        self._note(works and self.now >= self._election_until_s)
        self.at(TICK_S, self._turn)

    def _note(self, works: bool) -> None:
        """Tell the agents when the store goes away and when it comes back."""
        if not works and not self.store.away:
            self._away_since_s, self.store.away = self.now, True
            for agent in self.living():
                self.happen(agent, ev.StoreWentAway(problem="away"))
        if works and self.store.away:
            away_s = self.now - (self._away_since_s or 0.0)
            self.store.away, self._away_since_s = False, None
            self.store.distrust_until_s = self.now + (DISTRUST_S if away_s > LEASE_S else 0.0)
            for agent in self.living():
                self.happen(agent, ev.StoreCameBack())
        if self._away_since_s is not None and self.agents:
            self.longest_away_s = max(self.longest_away_s, self.now - self._away_since_s)
            if self.longest_away_s > AWAY_MAX_S:
                raise QuorumError(f"no quorum for {self.longest_away_s} s after the loss of one host")
