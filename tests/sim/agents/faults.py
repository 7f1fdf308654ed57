"""What goes wrong, and when: all of it is drawn before the schedule begins."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from elastrain.protocol.agent_messages import Failed, Suspect
from tests.sim.agents.actors import SimWorker
from tests.sim.agents.schedule import FAULTS_UNTIL_S

if TYPE_CHECKING:
    from tests.sim.agents.world import World


class SimFaults:
    """Draws the faults of one schedule and strikes."""

    def __init__(self, world: World) -> None:
        self.world = world

    def draw(self) -> None:
        kinds = ("worker", "worker", "worker", "node", "node", "all nodes", "cut", "store", "commit", "raise")
        weights = (3, 3, 3, 3, 3, 2, 2, 1, 2, 1)
        self.world.members.victims_wait = 0
        at_s = self.world.rng.uniform(0.2, FAULTS_UNTIL_S - 8)
        for _ in range(self.world.play.faults):
            kind = self.world.rng.choices(kinds, weights)[0]
            self.world.at(at_s, lambda kind=kind: self._strike(kind))  # type: ignore[misc]
            close = self.world.rng.random() < (0.8 if self.world.play.burst else 0.3)
            at_s = at_s + self.world.rng.uniform(0, 4) if close else self.world.rng.uniform(0.2, FAULTS_UNTIL_S - 8)
            at_s = min(at_s, FAULTS_UNTIL_S - 8)

    def _strike(self, kind: str) -> None:
        workers, names = self.world.members.living(), [agent.name for agent in self.world.living()]
        match kind:
            case "worker" | "raise" if workers:
                victim = self.world.rng.choice(workers)
                self.world.say(f"FAULT {victim.id} of {victim.agent.name} is killed ({kind})")
                began = victim.committed >= 0
                if kind == "raise" and began:
                    failed = Failed(step=victim.committed + 1, micro_batch=0, signature=victim.id, traceback="")
                    self.world.members.say(victim, failed)
                self.world.members.die(victim, code=1 if kind == "raise" and began else -9)
            case "node" if names:
                self.world.nodes.kill_node(self.world.rng.choice(names))
            case "all nodes":
                again_s = self.world.rng.choice((None, 2.0))
                for name in names:
                    delay_s = self.world.rng.choice((0.0, self.world.rng.uniform(0, 2)))
                    self.world.at(delay_s, lambda name=name: self.world.nodes.kill_node(name, again_s))  # type: ignore[misc]
            case "cut" if len(names) > 1:
                self.world.nodes.cut_off(frozenset(self.world.rng.sample(names, 2)), self.world.rng.uniform(0.5, 8))
            case "store":
                self.world.store.go_away(self.world.rng.uniform(0.5, 7))
            case "commit":
                self.world.members.victims_wait += 1

    def draw_broken_links(self, rng: random.Random) -> None:
        for _ in range(rng.choice((0, 0, 1, 2))):
            self.world.at(rng.uniform(0.2, FAULTS_UNTIL_S - 8), lambda: self._break_link(rng))

    def _break_link(self, rng: random.Random) -> None:
        members = [w for w in self.world.members.living() if w.view is not None]
        if len(members) < 2:
            return
        one, other = rng.sample(members, 2)
        self.world.say(f"FAULT {one.id} and {other.id} have lost their link")
        self.world.members.broken.append((one, other))
        self.accuse(one, other, mutual=rng.random() < 0.7)

    def accuse(self, one: SimWorker, other: SimWorker, *, mutual: bool) -> None:
        """Again and again, as `RECOVERY_DEADLINE_S` has it, while both are members and live."""
        if not (one.alive and other.alive and one.agent.alive and other.agent.alive):
            return
        if one.view is not None and other.view is not None and other.id in one.view and one.id in other.view:
            for by, of in ((one, other), (other, one))[: 1 + mutual]:
                self.world.members.say(by, Suspect(member=of.id, reason="no link"))
        self.world.at(3.0, lambda: self.accuse(one, other, mutual=mutual))


def random_faults(world: World) -> None:
    faults = SimFaults(world)
    faults.draw()
    faults.draw_broken_links(random.Random(f"links {world.seed}"))
