"""The lives of a simulated job, and what a node does between two of them.

Whether a life follows, and which nodes go on in it, is production's: `life_changes.agree`, `life_keys`, `lives`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elastrain.base.environment import scope
from elastrain.base.resume import Resume
from elastrain.job.values import Initial, Shape
from elastrain.launcher.shared.job_values import Life, Roster
from elastrain.launcher.start.restarts import BARREN_MAX, Following, LifeEnd, after_alone, agree
from elastrain.launcher.store.life_keys import read_life
from elastrain.launcher.store.port import StoreUnavailableError
from tests.sim.job.checks import JobChecks
from tests.sim.job.clock import Process
from tests.sim.job.disk import Manifest
from tests.sim.job.etcd import Client
from tests.sim.member import Violation

if TYPE_CHECKING:
    from tests.sim.job.agent import AgentProcess
    from tests.sim.job.world import World

_ASK_AGAIN_S = 0.5
_SIGNALLED = 128
_TTL_S = 3600.0


class SimLife:
    """What all members of a life have in common."""

    def __init__(self, world: World, number: int, shape: Shape, stored: tuple[int, ...] | None) -> None:
        self._world = world
        self.number, self.scope = number, scope("job", number)
        self.shape, self.stored = shape, stored
        self.loop = str(shape.initial.step + 1)
        """The loop's state in the checkpoint."""
        self.resume: Resume | None = None
        """What the roster says that it starts from."""
        self._has_begun = number == 1
        self.checks = JobChecks(world, self)

    def begin(self, roster: Roster, life: Life) -> None:
        """As the roster says; once for all its nodes."""
        if not self._has_begun:
            self._has_begun, self.resume = True, roster.resume
            stored = self._world.disk.begin(life, roster)
            if stored is not None:
                self._read(stored)
        elif self.number > 1 and roster.resume != self.resume:
            raise Violation(f"life {self.number} goes on from {self.resume} and from {roster.resume}")

    @property
    def has_members(self) -> bool:
        """Whether anybody was ever started in it."""
        return any(process.life is self for process in self._world.processes.values())

    def _read(self, manifest: Manifest) -> None:
        initial = Initial(step=manifest.step, is_stored=True, scaler=manifest.scaler)
        self.shape, self.stored, self.loop = replace(self.shape, initial=initial), manifest.states, manifest.loop
        self.checks.members.shape = self.shape


class Lives:
    """By number; and the launchers whose agents have ended."""

    def __init__(self, world: World, shape: Shape, stored: tuple[int, ...] | None) -> None:
        self._world, self._shape = world, replace(shape, initial=Initial())
        self._by_number = {1: SimLife(world, 1, shape, stored)}
        self.launchers: list[Launcher] = []
        self.found_good: dict[int, str] = {}
        """Life -> the newest good checkpoint when it was agreed upon: what it starts from is no older."""
        self._gone: list[AgentProcess] = []
        """Those whose nodes have ended for good, though the job was not done there."""

    @property
    def newest(self) -> SimLife:
        return self._by_number[max(self._by_number)]

    def of(self, number: int) -> SimLife:
        if number not in self._by_number:
            self._by_number[number] = SimLife(self._world, number, self._shape, None)
            self._world.say(f"life {number} begins")
        return self._by_number[number]

    def every(self) -> list[SimLife]:
        return list(self._by_number.values())

    @property
    def waiting(self) -> list[Launcher]:
        return [launcher for launcher in self.launchers if launcher.alive]

    def standing(self) -> Life:
        """As the store has it, for a node that enters."""
        return read_life(self._world.etcd.memory, "job")[1]

    def entered(self, life: Life, node: str, incarnation: int, *, has_roster: bool) -> Life:
        """With what this node would start it from, as `starting` asks for it before the agent is made."""
        if life.number == 1 or has_roster:
            return life
        return self._world.disk.with_start(life, node, incarnation, self.found_good.get(life.number, ""))

    def ended(self, agent: AgentProcess) -> None:
        """Its launcher asks what follows; not where the job is done, or nothing writes checkpoints."""
        end = agent.core.shutdown.end
        if not self._world.schedule.checkpoint_every or end is None or end.code == 0 or end.code > _SIGNALLED:
            return
        launcher = Launcher(self._world, agent)
        self.launchers.append(launcher)
        launcher.later(self._world.clock.soon(), launcher.ask)

    def follows(self, launcher: Launcher, following: Following) -> None:
        """The launcher has its answer."""
        world, agent = self._world, launcher.agent
        world.say(f"{agent.name}: {following.reason}")
        if following.life is None:
            launcher.check_end(following)
            self._gone.append(agent)
            return
        if following.life.number not in self.found_good:
            self.found_good[following.life.number] = launcher.good or ""
        if agent.core.cluster.config.alone:
            world.begin_alone(agent.name, following.life)
        else:
            world.start_node(agent.name)

    def others_first(self, launcher: Launcher) -> None:
        """Between a look and the transaction that rests on it, another launcher may be faster."""
        if self._world.clock.rng.random() < 0.2:
            for other in self.waiting:
                if other is not launcher and other.runs and not other.is_asking:
                    other.ask()

    def at_the_end(self) -> None:
        """Who has heard how a life was lost goes on in the next one, as all others do."""
        agents = [*self._world.past, *self._world.agents.values()]
        ends = [(agent, agent.core.shutdown.end) for agent in agents]
        lost = {(agent.life.number, end.sentence) for agent, end in ends if end is not None and end.lost}
        for agent in self._gone:
            end, number = agent.core.shutdown.end, agent.life.number
            if end is not None and not end.lost and (number, end.sentence) in lost and number < self.newest.number:
                raise Violation(f"{agent.name} ends with life {number}, the others go on: {end.sentence}")

    def kill_one(self, node: int) -> bool:
        """A node loses its power between two lives."""
        waiting = self.waiting
        if waiting:
            waiting[node % len(waiting)].alive = False
        return bool(waiting)


class Launcher(Process):
    """Of a node whose agent has ended: it asks the store what follows until it is answered."""

    def __init__(self, world: World, agent: AgentProcess) -> None:
        super().__init__(world.clock, agent.name)
        self._world, self.agent = world, agent
        end: Any = agent.core.shutdown.end
        first_member = agent.core.cluster.first_unused_number()
        life = replace(agent.core.cluster.config.life, resume=None)  # as it stands in the store
        self._ended = LifeEnd(life=life, end=end, first_member=first_member, is_local=world.schedule.local_disks)
        self._newest_step = world.disk.newest_step(agent.name) if end.lost else None
        self.good = world.disk.newest_good(agent.name)
        """When it looked."""
        self.is_asking = False
        self._client: Any = Client(world.etcd, self)
        self._client.before_commit = lambda: world.lives.others_first(self)

    def ask(self) -> None:
        """As `SharedLives.after` does."""
        if not self.alive:
            return
        self._client.blocked_s, self.is_asking = 0.0, True
        try:
            following = self._agree()
        except StoreUnavailableError:
            self.later(self._client.blocked_s + _ASK_AGAIN_S, self.ask)
            return
        finally:
            self.is_asking = False
        self.alive = False
        self._world.lives.follows(self, following)

    def _agree(self) -> Following:
        if self.agent.core.cluster.config.alone:
            return after_alone(self._ended, self._newest_step)
        return agree(self._client, "job", _TTL_S, self._ended, self._newest_step)

    def check_end(self, following: Following) -> None:
        """No node ends for good while there is a way back."""
        ended = self._ended
        if ended.end.lost and self.good is not None and ended.life.barren < BARREN_MAX - 1:
            raise Violation(f"{self.agent.name} ends, though {self.good} is good: {following.reason}")
