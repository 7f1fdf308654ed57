"""The whole job in virtual time: nodes and their agents, members, network, store, faults, and what must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elastrain import protocol as p
from elastrain.base.environment import scope
from elastrain.base.resume import Resume
from elastrain.launcher.shared.job_values import Life
from elastrain.launcher.start.registration import least_start
from elastrain.launcher.store.job_keys import JobKeys
from elastrain.launcher.store.registry import LEASE_S
from elastrain.protocol.messages import Message
from tests.sim.cluster import initial_of
from tests.sim.job.agent import AgentProcess
from tests.sim.job.checks import STEPS_MAX, JobChecks, truth_of
from tests.sim.job.clock import Clock
from tests.sim.job.disk import Disk
from tests.sim.job.etcd import Etcd
from tests.sim.job.faults import Faults
from tests.sim.job.lives import Lives
from tests.sim.job.member import MemberProcess
from tests.sim.job.meshes import Meshes
from tests.sim.job.network import STORE, Network
from tests.sim.job.node_disks import NodeDisks
from tests.sim.job.schedule import Join, Schedule, shape_of
from tests.sim.job.shells import virtual

QUIET_S = 60.0
"""After the last fault everything is mended: by then each agent has ended, and the job with them."""
LONG_STEP_S = 2.0
"""A step of a job with stragglers in it may take so long."""


class World:
    """One schedule, played. `tell` takes the lines of its transcript."""

    def __init__(self, schedule: Schedule, tell: Callable[[str], None] | None = None) -> None:
        self.schedule, self.tell = schedule, tell
        self.truth = truth_of(schedule.runs, is_long=schedule.steps > STEPS_MAX)
        self.clock = Clock(schedule.seed)
        self.network = Network(self.clock)
        self.etcd = Etcd(self.clock, self.network, revision=1000 if schedule.used_store else 1)
        self.agents: dict[str, AgentProcess] = {}
        """Node -> its newest start."""
        self.past: list[AgentProcess] = []
        self.processes: dict[str, MemberProcess] = {}
        self.dead: set[str] = set()
        self.mesh = Meshes(self)
        self.faults = Faults(self)
        shape = replace(shape_of(schedule), initial=initial_of(schedule.resumes, self.truth))
        self.disk: Disk | NodeDisks = NodeDisks(self, len(shape.shards)) if schedule.local_disks else Disk()
        self.lives = Lives(self, shape, self.truth.stored(shape) if shape.initial.is_stored else None)
        self.etcd.on_write = self._written
        self.misfits = 0
        self.over = ""
        """Why nothing more can come of it."""
        joins = sum(isinstance(fault, Join) for fault in schedule.faults)
        self.nodes_max = schedule.nodes + joins
        self.slow_node = f"node{schedule.slow_store}"
        self._nested = False
        self.network.on_cut.append(self._on_cut)
        self.network.on_heal.append(self._on_heal)

    @property
    def checks(self) -> JobChecks:
        """Of the newest life."""
        return self.lives.newest.checks

    def _written(self, put: Mapping[str, bytes]) -> None:
        for life in self.lives.every():
            life.checks.written(put)

    # ---- playing

    def run(self) -> None:
        """Play to the end. Raises Violation."""
        with virtual(self), self.disk.opened():
            for index in range(self.schedule.nodes):
                self.clock.at(self.clock.rng.uniform(0, 0.5), lambda index=index: self.start_node(f"node{index}"))  # type: ignore[misc]
            self.faults.plan()
            until_s = self.schedule.ends_s + QUIET_S + LONG_STEP_S * max(0, self.schedule.steps - STEPS_MAX)
            while not self.over and self.clock.turn(until_s):
                if self._nobody_is_left():
                    break
            self.checks.at_the_end()
            self.lives.at_the_end()

    def _nobody_is_left(self) -> bool:
        waiting = self.faults.starting or not self.faults.none_to_come or not self.agents
        return not (waiting or self.living_agents() or self.living() or self.lives.waiting)

    def living_agents(self) -> list[AgentProcess]:
        return [agent for agent in self.agents.values() if agent.alive]

    def living(self) -> list[MemberProcess]:
        return [process for process in self.processes.values() if process.alive]

    def agent_lives(self, agent: AgentProcess) -> bool:
        return agent.alive and self.agents.get(agent.node) is agent

    def is_misfit_due(self) -> bool:
        due, self.misfits = self.misfits > 0, max(self.misfits - 1, 0)
        return due

    # ---- nodes

    def start_node(self, name: str, waited_s: float = 0.0) -> None:
        """As `enrol` does: wait until the name is free, clear what a dead job left, take an incarnation."""
        there = self.agents.get(name)
        if (there is not None and there.alive) or self.over:
            return
        if there is not None and self.nodes_max == 1:
            self.over = "the only node is started again: another job"
            return
        self.faults.starting += 1
        if self.nodes_max == 1:
            self._begin(name, 0, self._first_life())
            return
        memory, life = self.etcd.memory, self.lives.standing()
        job = scope("job", life.number)
        records = [item.key for item in memory.list(f"/elastrain/{job}/nodes/").items]
        roster = self.etcd.item("roster", job)
        is_dead_job = roster is not None and not records
        unreachable = self.etcd.is_away or not self.network.reach_each_other(name, STORE)
        if unreachable or f"/elastrain/{job}/nodes/{name}" in records or (is_dead_job and waited_s < 2 * LEASE_S):
            self.faults.starting -= 1
            counted_s = waited_s + 0.5 if is_dead_job else 0.0
            self.faults.starting += 1
            self.clock.at(0.5, lambda: self._start_again(name, counted_s))
            return
        if is_dead_job:
            self.over = "all nodes were dead, and another job begins under the same name"
            return
        if self._is_gone(life.number, has_roster=roster is not None):
            # The last node has taken the job's keys along, or the store has lost them after all nodes were killed.
            self.over = "the job is gone, and another begins under the same name"
            return
        if roster is None and self.lives.of(life.number).checks.all_were_told_to_go():
            # They have taken the keys along, though one may be cut off that does not know it yet.
            self.over = "the operator has stopped the job, and another begins under the same name"
            return
        keys = JobKeys(memory, job)
        if roster is None and self.lives.of(life.number).checks.finishers:
            self._begin_another_job(name, keys)
            return
        incarnation = self._take_start(keys)
        has_roster = roster is not None
        is_first = life.number == 1
        life = self._first_life() if is_first else self.lives.entered(life, name, incarnation, has_roster=has_roster)
        self._begin(name, incarnation, life)

    def _begin_another_job(self, name: str, keys: JobKeys) -> None:
        """The job was done, and its keys were taken away; somebody may still be cut off. Of the other job no more is
        played than what its first node puts as it enters, before it dies: whoever comes back meets that.
        """
        self.faults.starting -= 1
        self.say(f"{name} begins another job under the same name, and dies")
        keys.put_once("job", {})
        self._take_start(keys)

    def _is_gone(self, number: int, *, has_roster: bool) -> bool:
        # Before its first view, too: where nobody is left who knows of its members, others bear their numbers.
        has_lived = self.lives.of(number).has_members
        return has_lived and not has_roster and not (self.living_agents() or self.lives.waiting)

    def _first_life(self) -> Life:
        initial = self.lives.of(1).shape.initial
        return Life(resume=Resume(place="disk", name="checkpoint", step=initial.step) if initial.is_stored else None)

    def begin_alone(self, name: str, life: Life) -> None:
        """The next life of the only node."""
        self.faults.starting += 1
        self._begin(name, 0, self.lives.entered(life, name, 0, has_roster=False))

    def _start_again(self, name: str, waited_s: float) -> None:
        self.faults.starting -= 1
        self.start_node(name, waited_s)

    def _take_start(self, keys: JobKeys) -> int:
        nodes = {item.key: item for item in self.etcd.memory.list(keys.node("")).items}
        return keys.take_number("incarnations", at_least=least_start(keys.records(nodes).values(), self.clock.now))

    def _begin(self, name: str, incarnation: int, life: Life) -> None:
        self.faults.starting -= 1
        if name in self.agents:
            self.past.append(self.agents[name])
        agent = AgentProcess(self, name, incarnation, life)
        self.agents[name] = agent
        self.made(agent)
        self.say(f"{name} starts, incarnation {incarnation}")
        agent.begin()

    def kill_agent(self, agent: AgentProcess, *, silent: bool) -> None:
        """Its process is gone; what its workers do about that comes after."""
        agent.alive, agent.vanished = False, silent
        for client in self.etcd.clients:
            if client is agent.client:
                client.close()
        for other in self.living_agents():
            if silent:
                other.links.begin_silence(agent.node) if other.links is not None else None
            elif other.links is not None:
                other.later(self.clock.soon(), lambda other=other: other.links.lose(agent, closed=True))  # type: ignore[misc]

    # ---- the network

    def _on_cut(self, source: str, to: str) -> None:
        agent = self.agents.get(to)
        if agent is not None and agent.alive and agent.links is not None:
            agent.links.begin_silence(source)
        self._break_news(source, to)

    def _on_heal(self, source: str, to: str) -> None:
        agent = self.agents.get(to)
        if agent is not None and agent.alive and agent.links is not None:
            agent.links.end_silence(source)

    def _break_news(self, source: str, to: str) -> None:
        if source == STORE and to in self.agents:
            self.agents[to].client.break_watch("the connection is lost")

    # ---- the store

    def newest_ids(self) -> Sequence[str]:
        view = self.checks.newest
        return view.ids if view is not None else ()

    def others_first(self, agent: AgentProcess) -> None:
        """Between a look and the transaction that rests on it, another agent's call may be carried out."""
        if self._nested or self.clock.rng.random() > 0.1:
            return
        self._nested = True
        try:
            for other in self.living_agents():
                if other is not agent and other.runs and other.peers is not None:
                    other.registry._thread._carry_out()
        finally:
            self._nested = False

    # ---- the transcript

    def say(self, line: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.clock.now:9.4f}  {line.rstrip()}")

    def made(self, agent: AgentProcess) -> None:
        """For stories."""

    def tell_event(self, member: str, event: p.Event) -> None:
        """For stories."""

    def tell_command(self, command: p.Command) -> None:
        """For stories."""

    def tell_send(self, source: str, to: str, message: Message) -> None:
        """For stories."""


def outcome(world: World) -> str:
    """How the schedule ended: "finished", "ended" (with a sentence), "lost" (with nobody left to say one)."""
    ends: list[Any] = [agent.core.shutdown.end for agent in [*world.past, *world.agents.values()]]
    if world.checks.finishers:
        return "finished"
    return "ended" if any(end is not None for end in ends) else "lost"
