"""What must hold: no job whose state is whole is ended, and at the end each agent has ended or goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastrain.job.world import View
from tests.sim.agents.actors import SimAgent
from tests.sim.agents.schedule import GOES_ON_S, SHARDS, Violation

if TYPE_CHECKING:
    from tests.sim.agents.world import World

_ENDS_THE_JOB = ("raised the same exception", "after it had finished its work", "the parameters at the end differ")
"""What nobody could mend."""


class SimChecks:
    """Raises Violation."""

    def __init__(self, world: World) -> None:
        self.world = world

    def proposal(self, agent: SimAgent, view: View) -> None:
        newest = self.world.store.newest_view()
        if not view.members and (newest is None or newest.generation < view.generation):
            self.false_end(view.reason)

    def false_end(self, why: str) -> None:
        """Nobody ends a job while living members of the newest view hold everything."""
        view = self.world.store.newest_view()
        if any(words in why for words in _ENDS_THE_JOB) or (self.world.members.highest < 0 and view is None):
            return
        members = [w for w in self.world.members.living() if view is not None and w.id in view]
        if not members:
            return
        top = max(worker.committed for worker in members)
        able = {s for w in members for s, v in w.held.items() if v == top or (v == top - 1 and s in w.kept)}
        if top >= 0 and len(able) == SHARDS:
            who = ", ".join(worker.id for worker in members)
            raise Violation(f"a job whose state is whole (held by {who}) is ended: {why}")

    def at_the_end(self) -> None:
        waiting = [agent for agent in self.world.living() if agent.core.shutdown.end is None]
        if waiting and self.world.now - self.world.members.last_commit_s > GOES_ON_S:
            told = [
                f"{a.name} parked: {a.core.parking.parked.reason}" if a.core.parking.parked else f"{a.name} waits"
                for a in waiting
            ]
            raise Violation(f"stands still since {self.world.members.last_commit_s:.1f} s: {'; '.join(told)}")
        parked = [agent for agent in waiting if agent.core.parking.parked is not None]
        if parked:
            raise Violation(f"{parked[0].name} is parked though all is mended: {parked[0].core.parking.parked}")
        self._places(waiting)
        for agent in (agent for agent in waiting if not agent.core.cluster.peers.record.spare):
            left_out = agent.core.cluster.view is None or not any(
                m.node == agent.name for m in agent.core.cluster.view.members
            )
            if left_out:
                raise Violation(f"{agent.name} has not come in: its view is {agent.core.cluster.view}")

    def _places(self, waiting: list[SimAgent]) -> None:
        """A spare waits only while as many nodes compute as there are places, and no more nodes compute."""
        spares = [agent for agent in waiting if agent.core.cluster.peers.record.spare]
        places, computing = self.world.play.nodes, len(waiting) - len(spares)
        if spares and computing < places:
            raise Violation(f"{spares[0].name} waits as a spare, and {computing} of {places} nodes compute")
        if self.world.play.spares and computing > places:
            raise Violation(f"{computing} nodes compute, and there are {places} places")
