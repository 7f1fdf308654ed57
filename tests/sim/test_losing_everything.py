"""The last holders of a shard die while newcomers are starting, in every combination: each node ends within seconds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from tests.sim.job.agent import AgentProcess
from tests.sim.job.member import MemberProcess
from tests.sim.job.schedule import KillNode, Schedule
from tests.sim.job.world import World

WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.002


def _has_state(process: MemberProcess) -> bool:
    return process.sim.committed >= 0


def _newcomers(world: World) -> list[MemberProcess]:
    first = world.schedule.nodes * world.schedule.workers
    return [p for p in world.living() if int(p.id.removeprefix("m")) >= first and not _has_state(p)]


STAGES: dict[str, Callable[[World], bool]] = {
    "before their hello": lambda world: any(not p.has_said_hello for p in _newcomers(world)),
    "ready": lambda world: any(p.has_said_hello for p in _newcomers(world)),
    "in the view without state": lambda world: any(p.id in world.newest_ids() for p in _newcomers(world)),
    "there are none": lambda world: bool(world.processes),
}
"""Where newcomers are when the last holders die."""
STRIKES = ("its workers", "its power", "its power, back after 0.5 s", "its agent", "silently")
"""What the node of the last holders loses."""
GAPS_S = (0.0, 2.0)
"""Between the two workers that are lost first: their replacements are on their way then."""


class Loss:
    """As many workers are lost as leave a holder of each shard, then all that has state; `lost_s` is when.

    Without backups the newcomer is on a node that comes late.
    """

    def __init__(self, world: World, stage: str, strike: str, gap_s: float) -> None:
        self._world, self._is_at_stage, self._strike, self._gap_s = world, STAGES[stage], strike, gap_s
        backups = world.schedule.backups
        self._first = 0 if stage == "there are none" else min(2, 2 * backups if gap_s else backups)
        self.lost_s = 0.0

    @property
    def _needs_a_late_node(self) -> bool:
        return self._world.schedule.backups == 0 and self._is_at_stage is not STAGES["there are none"]

    def begin(self) -> None:
        """Once the job has committed two steps: until then nothing can be lost, or copies may be missing."""
        holders = [p for p in self._world.living() if p.sim.committed >= 1]
        if len(holders) < self._world.schedule.nodes * self._world.schedule.workers:
            self._world.clock.at(_LOOK_AGAIN_S, self.begin)
            return
        if self._needs_a_late_node:
            self._world.start_node("late0")
        for index, process in enumerate(holders[: self._first]):
            self._world.clock.at(index * self._gap_s, lambda process=process: process.die(-9))  # type: ignore[misc]
        self._world.clock.at((self._first and self._first - 1) * self._gap_s, self._look)

    def _look(self) -> None:
        if self.lost_s:
            return
        if not self._is_at_stage(self._world):
            self._world.clock.at(_LOOK_AGAIN_S, self._look)
            return
        self.lost_s = self._world.clock.now
        for process in [p for p in self._world.living() if _has_state(p)]:
            self._lose(process)

    def _lose(self, process: MemberProcess) -> None:
        node = self._world.agents[process.node]
        if self._strike == "its workers" or not node.alive or node.core.cluster.config.alone:
            process.die(-9)
            return
        again_s = 0.5 if "back" in self._strike else None
        fault = KillNode(
            at_s=0.0, node=0, again_s=again_s, is_silent=self._strike == "silently", agent_only="agent" in self._strike
        )
        self._world.faults._kill_node(node, fault)


def lose(schedule: Schedule, stage: str, strike: str, gap_s: float) -> tuple[World, Loss, dict[AgentProcess, float]]:
    """Play it; when each agent has come to its end."""
    world, ended_s = World(schedule), dict[AgentProcess, float]()
    world.nodes_max += schedule.backups == 0
    loss, judge = Loss(world, stage, strike, gap_s), world.checks._ends

    def ends(agent: AgentProcess, end: object) -> None:
        ended_s[agent] = world.clock.now
        judge(agent, end)  # type: ignore[arg-type]

    world.checks._ends = ends  # type: ignore[method-assign]
    world.clock.at(0.0, loss.begin)
    world.run()
    return world, loss, ended_s


@pytest.mark.parametrize("backups", [0, 1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_every_node_ends_within_seconds_when_the_last_holders_die(stage: str, backups: int) -> None:
    for nodes, strike, gap_s in product((1, 3), STRIKES, GAPS_S):
        workers = 3 if nodes == 1 else 1
        schedule = Schedule(seed=7, nodes=nodes, workers=workers, backups=backups, steps=30, runs=3)
        world, loss, ended_s = lose(schedule, stage, strike, gap_s)
        told = f"{nodes} nodes, {strike}, {gap_s} s apart"
        assert loss.lost_s, f"{told}: newcomers were never {stage}"
        assert not world.checks.finishers, told
        for agent in [*world.past, *world.agents.values()]:
            end = agent.core.shutdown.end
            if end is None:
                assert not agent.alive, f"{told}: {agent.name} waits"
            elif not world.over:
                assert end.code and end.sentence, told
                assert ended_s[agent] - loss.lost_s <= WITHIN_S, f"{told}: {agent.name} {end.sentence}"
