"""Faults strike: each as its value in the schedule says, upon whom it finds then."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastrain.launcher.core.agent_events import StopAsked
from elastrain.launcher.core.leaving.stopping import PREEMPTED
from elastrain.protocol.agent_messages import Failed
from tests.sim.job import schedule as sc
from tests.sim.job.disk import Disk
from tests.sim.job.member import MemberProcess
from tests.sim.job.network import STORE
from tests.sim.job.node_disks import NodeDisks

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess
    from tests.sim.job.world import World


class Faults:
    """`struck` counts those that found somebody."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.struck = 0
        self.starting = 0
        """Nodes that are about to start."""
        self._left = 0

    @property
    def none_to_come(self) -> bool:
        return self._left == 0

    def plan(self) -> None:
        for fault in self._world.schedule.faults:
            self._left += 1
            self._world.clock.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: sc.AnyFault) -> None:
        self._left -= 1
        self._world.say(f"FAULT {fault}")
        match fault:
            case sc.Kill() | sc.Raise() | sc.Stall() | sc.Straggle() | sc.KillHolders() | sc.Reset():
                self._on_members(fault)
            case sc.KillNode() | sc.KillAll() | sc.Pause() | sc.Preempt():
                self._on_nodes(fault)
            case sc.Damage() | sc.DamageDisk() | sc.LoseDisk() | sc.DiskFull():
                self._on_disks(fault)
            case sc.Cut() | sc.Isolate() | sc.Slow():
                self._on_network(fault)
            case _:
                self._on_store(fault)

    def _member(self, who: int) -> MemberProcess | None:
        living = [process for process in self._world.living() if process.has_said_hello]
        return living[who % len(living)] if living else None

    def _agent(self, node: int) -> AgentProcess | None:
        agents = self._world.living_agents()
        return agents[node % len(agents)] if agents else None

    # ---- members

    def _on_members(self, fault: sc.Kill | sc.Raise | sc.Stall | sc.Straggle | sc.KillHolders | sc.Reset) -> None:
        if isinstance(fault, sc.KillHolders):
            self._kill_holders(fault)
            return
        process = self._member(fault.who)
        if process is None:
            return
        self.struck += 1
        match fault:
            case sc.Kill(phase="", sends=0):
                process.die(-9)
            case sc.Kill(phase=""):
                process.mesh.sends_left = fault.sends
            case sc.Kill():
                process.points.phase = fault.phase
            case sc.Raise():
                self._raise(process)
            case sc.Stall():
                process.loop.stalls_for_s = fault.for_s
            case sc.Straggle():
                process.loop.straggle(fault.factor, fault.for_s)
            case sc.Reset():
                other = self._member(fault.other)
                if other is not None and other is not process:
                    self._world.mesh.reset(process, other, "the connection was reset")

    def _raise(self, process: MemberProcess) -> None:
        """Before the first commit that would be the script's own fault."""
        has_committed = not process.sim.machine.commit.is_initial
        if has_committed:
            failed = Failed(step=process.sim.committed + 1, micro_batch=0, signature=process.id, traceback="")
            process.link.say(failed)
        process.die(1 if has_committed else -9)

    def _kill_holders(self, fault: sc.KillHolders) -> None:
        holders = self._world.checks.holders(fault.shard % len(self._world.lives.newest.shape.shards))
        if len(holders) <= fault.spared or not holders:
            return
        self.struck += 1
        for member in holders[fault.spared :]:
            self._world.processes[member].die(-9)

    # ---- nodes

    def _on_nodes(self, fault: sc.KillNode | sc.KillAll | sc.Pause | sc.Preempt) -> None:
        match fault:
            case sc.Preempt():
                agent = self._agent(fault.node)
                if agent is not None:
                    self.struck += 1
                    self._preempt(agent, fault.again_s)
            case sc.KillNode():
                agent = self._agent(fault.node)
                if agent is None:
                    self.struck += self._world.lives.kill_one(fault.node)
                else:
                    self.struck += 1
                    self._kill_node(agent, fault)
            case sc.KillAll():
                for agent in self._world.living_agents():
                    self.struck += 1
                    delay_s = self._world.clock.rng.uniform(0, fault.spread_s)
                    self._world.clock.at(delay_s, lambda agent=agent: self._kill_one_of_all(agent, fault))  # type: ignore[misc]
            case sc.Pause(is_node=True):
                agent = self._agent(fault.who)
                if agent is not None:
                    self.struck += 1
                    self._pause_node(agent, fault.for_s)
            case sc.Pause():
                process = self._member(fault.who)
                if process is not None:
                    self.struck += 1
                    process.pause(fault.for_s)

    def _kill_one_of_all(self, agent: AgentProcess, fault: sc.KillAll) -> None:
        if agent.alive:
            self._kill_node(agent, sc.KillNode(at_s=fault.at_s, node=0, again_s=fault.again_s))

    def _kill_node(self, agent: AgentProcess, fault: sc.KillNode) -> None:
        world = self._world
        world.say(f"FAULT {agent.name} is killed")
        world.kill_agent(agent, silent=fault.is_silent)
        for process in agent.workers.living:
            if fault.agent_only:  # its guardian kills them, or they see that it is gone
                world.clock.at(world.clock.rng.uniform(0, 0.4), lambda process=process: process.die(-9, told=False))  # type: ignore[misc]
            else:
                process.vanished = fault.is_silent
                process.die(-9, silent=fault.is_silent, told=False)
        if fault.again_s is not None:
            self.starting += 1

            def again() -> None:
                self.starting -= 1
                world.start_node(agent.name)

            world.clock.at(fault.again_s, again)

    def _preempt(self, agent: AgentProcess, again_s: float | None) -> None:
        """Say to its agent what SIGTERM says: a process that stands still hears it when it goes on."""
        world = self._world
        told = StopAsked(code=PREEMPTED, sentence="stopped by SIGTERM")
        agent.later(world.clock.soon(), lambda: agent.happen(told))
        if again_s is None:
            return
        self.starting += 1

        def again() -> None:
            self.starting -= 1
            if not agent.alive:
                world.start_node(agent.name)

        world.clock.at(again_s, again)

    def _pause_node(self, agent: AgentProcess, for_s: float) -> None:
        world = self._world
        agent.pause(for_s)
        for process in agent.workers.living:
            process.pause(for_s)
        for other in world.living_agents():
            if other is not agent and other.links is not None:
                other.links.begin_silence(agent.node)

        def woken() -> None:
            for other in world.living_agents():
                if other is not agent and other.links is not None and agent.alive:
                    other.links.end_silence(agent.node)

        world.clock.at(for_s + 1e-6, woken)

    # ---- the network

    def _on_network(self, fault: sc.Cut | sc.Isolate | sc.Slow) -> None:
        agent = self._agent(fault.node)
        if agent is None:
            return
        name = agent.name
        if isinstance(fault, sc.Isolate):
            # Whoever comes or comes back meanwhile reaches it no more than the others.
            late = sum(isinstance(other, sc.Join) for other in self._world.schedule.faults)
            names = [f"node{n}" for n in range(self._world.schedule.nodes)] + [f"late{n}" for n in range(late)]
            for place in [other for other in names if other != name] + ([STORE] if fault.store else []):
                self._cut(name, place, fault.for_s, both=True)
            self.struck += 1
            return
        peer = self._agent(fault.other) if fault.other >= 0 else None
        place = peer.name if peer is not None else STORE
        if place == name:
            return
        self.struck += 1
        if isinstance(fault, sc.Slow):
            self._world.network.slow(name, place, fault.factor, fault.for_s)
        else:
            self._cut(name, place, fault.for_s, both=fault.both)

    def _cut(self, one: str, other: str, for_s: float, *, both: bool) -> None:
        self._world.network.cut(one, other, for_s)
        if both:
            self._world.network.cut(other, one, for_s)

    # ---- disks

    def _on_disks(self, fault: sc.Damage | sc.DamageDisk | sc.LoseDisk | sc.DiskFull) -> None:
        disk = self._world.disk
        match fault:
            case sc.Damage() if isinstance(disk, Disk):
                self.struck += disk.damage_newest()
            case sc.DiskFull():
                self.struck += 1
                self._fill(fault.for_s)
            case sc.DamageDisk() if isinstance(disk, NodeDisks) and disk.nodes:
                self.struck += disk.damage(disk.nodes[fault.node % len(disk.nodes)], fault.which)
            case sc.LoseDisk() if isinstance(disk, NodeDisks) and disk.nodes:
                self.struck += 1
                node = disk.nodes[fault.node % len(disk.nodes)]
                agent = self._world.agents.get(node)
                if agent is not None and agent.alive:
                    self._kill_node(agent, sc.KillNode(at_s=fault.at_s, node=0, again_s=fault.again_s))
                disk.lose(node)

    def _fill(self, for_s: float) -> None:
        disk = self._world.disk
        disk.is_full = True

        def empty() -> None:
            disk.is_full = False

        self._world.clock.at(for_s, empty)

    # ---- the store, and those who come

    def _on_store(self, fault: sc.AnyFault) -> None:
        world, etcd = self._world, self._world.etcd
        self.struck += 1
        match fault:
            case sc.StoreAway() if not etcd.is_away:
                etcd.go_away(fault.for_s, restarts=fault.restarts)
            case sc.StoreTorn() if not etcd.is_torn:
                etcd.tear(fault.for_s)
            case sc.Compact():
                etcd.compact()
            case sc.Wipe() if not etcd.is_away:
                world.checks.store_forgets()
                etcd.go_away(fault.for_s, restarts=False, wiped=True)
            case sc.Join():
                joined = sum(name.startswith("late") for name in world.agents)
                world.start_node(f"late{joined}")
            case sc.Misfit():
                world.misfits += 1
