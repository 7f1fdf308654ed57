"""Members follow their agents' views, commit steps, recover and die."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from elastrain.decisions.recovery import decide
from elastrain.job.placement import next_roles, target
from elastrain.job.values import Unrecoverable
from elastrain.job.world import Member, View
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import Start, Tell
from elastrain.protocol.agent_messages import EndReached, Finished, Hello, LostState, NewView, Progress, Suspect
from tests.sim.agents.actors import SimAgent, SimWorker
from tests.sim.agents.schedule import SHARDS, STEP_S, Violation

if TYPE_CHECKING:
    from tests.sim.agents.world import World


class SimMembers:
    """All members of the job; `highest` is the newest step that anybody has committed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broken: list[tuple[SimWorker, SimWorker]] = []
        """Pairs of members whose own link is gone for good, though their agents reach each other."""
        self.highest, self.last_commit_s = -1, 0.0
        self.victims_wait = 0
        """So many commits are still to be broken by a death."""
        self.finishing: list[SimWorker] = []
        """Those that have committed the last step."""

    def start(self, agent: SimAgent, start: Start) -> None:
        member = Member(id=start.member, node=agent.name, address="x", incarnation=agent.incarnation)
        worker = agent.workers[start.member] = SimWorker(start.member, agent, member)
        self.world.at(self.world.rng.choice((0.2, 0.5, 3.0)), lambda: self._say_hello(worker))

    def _say_hello(self, worker: SimWorker) -> None:
        hello = Hello(member=worker.id, address="x", spec={"backups": self.world.play.backups})
        self.say(worker, hello)

    def say(self, worker: SimWorker, message: Any) -> None:
        agent = worker.agent
        if worker.alive:
            act = lambda: self.world.happen(agent, ev.WorkerSpoke(member=worker.id, message=message))  # noqa: E731
            self.world.in_order(agent, ("worker", worker.id), 0.001, act)

    def die(self, worker: SimWorker, *, told: bool = True, code: int = -9) -> None:
        if not worker.alive:
            return
        worker.alive = False
        agent = worker.agent

        def act() -> None:
            self.world.happen(agent, ev.WorkerDied(member=worker.id, source="pidfd", at_s=self.world.now))
            self.world.happen(agent, ev.WorkerExited(member=worker.id, exit_code=code))

        if told:
            self.world.in_order(agent, ("worker", worker.id), self.world.soon(), act)
        for other in self.living():
            if worker.view is not None and other.view is not None and other.id in worker.view:
                same_host = self.world.play.one_host or other.agent is agent
                self.say(other, Suspect(member=worker.id, reason="ended", dead=same_host))

    def living(self) -> list[SimWorker]:
        return [worker for agent in self.world.living() for worker in agent.workers.values() if worker.alive]

    def hear(self, agent: SimAgent, command: Tell) -> None:
        worker = agent.workers[command.member]
        if isinstance(command.message, NewView):
            view = command.message.view
            self.world.at(0.001, lambda: self._viewed(worker, view) if worker.alive else None)
        elif isinstance(command.message, EndReached):
            self.world.at(self.world.soon(), lambda: self._freed(worker))

    def _freed(self, worker: SimWorker) -> None:
        """A member has passed the end. A worker that had not come so far has nothing left to do."""
        if worker not in self.finishing:
            self.die(worker, code=1)

    def _viewed(self, worker: SimWorker, view: View) -> None:
        if worker.newest is not None and view.generation <= worker.newest.generation:
            return
        if worker.id not in view:
            if worker.view is not None:
                self.die(worker, code=1)
            return
        worker.newest = view
        if worker.view is None or set(worker.view.ids) - set(view.ids) or view.links_since > worker.view.generation:
            self.switch(worker)

    def switch(self, worker: SimWorker) -> None:
        worker.view, worker.recovered = worker.newest, False

    def step(self) -> None:
        """Every group that is whole recovers, or commits a step."""
        self.world.at(STEP_S * self.world.rng.uniform(0.5, 1.5), self.step)
        if self.finishing:
            return
        by_id = {worker.id: worker for worker in self.living()}
        for view in {w.view.generation: w.view for w in by_id.values() if w.view is not None}.values():
            group = [by_id[m] for m in view.ids if m in by_id]
            for worker in group:  # left behind: one of its view has gone on
                ahead = any(o.view and o.view.generation > view.generation for o in group)
                if worker.view is view and ahead and worker.newest is not view:
                    self.switch(worker)
            here = [w for w in group if w.view is not None and w.view.generation == view.generation]
            if len(here) == len(view.ids) and self._reach_each_other(here):
                if all(worker.recovered for worker in here):
                    self._commit(view, here)
                else:
                    self._recover(view, here)

    def _reach_each_other(self, group: Sequence[SimWorker]) -> bool:
        names = {worker.agent.name for worker in group}
        apart = any(one in group and other in group for one, other in self.broken)
        return not apart and not any(pair <= names for pair in self.world.nodes.cut)

    def _recover(self, view: View, group: Sequence[SimWorker]) -> None:
        reports = {worker.id: worker.report() for worker in group}
        decision = decide(view, reports, self.world.shape)
        if isinstance(decision, Unrecoverable):
            self.world.checks.false_end(decision.reason)
            for worker in group:
                self.say(worker, LostState(sentence=decision.reason))
                self.die(worker, code=1)
            return
        # Where all who knew of the first commits died while the store was away, nobody can know that there were any.
        nobody_knows = decision.committed < 0 and self.world.store.item("begun") is None
        if decision.committed < self.highest - 1 and not nobody_knows:
            raise Violation(f"generation {view.generation} goes on from {decision.committed}, not {self.highest}")
        for worker in group:
            worker.committed = worker.parameters = decision.committed
            worker.base, worker.now, worker.recovered = decision.base, decision.now, True
            mine = [s for s, holders in enumerate(worker.now) if worker.id in holders.all]
            worker.held, worker.kept = dict.fromkeys(mine, worker.committed), set()

    def _commit(self, view: View, group: list[SimWorker]) -> None:
        now, step = group[0].now, group[0].committed + 1
        ready = {worker.id for worker in group}
        goal = target(now, self.world.shape.sizes, view.nodes, self.world.play.backups)
        shard = self.world.rng.randrange(SHARDS)
        moved = tuple(next_roles(h, goal[s], ready) if s == shard else h for s, h in enumerate(now))
        for worker in group:
            worker.kept = {s for s, h in enumerate(now) if worker.id in h.all}
        order = self.world.rng.sample(group, len(group))
        if (
            self.world.rng.random() < 0.15 and self.victims_wait
        ):  # somebody dies while some have passed and others have not
            self.victims_wait -= 1
            order = order[: self.world.rng.randint(0, len(order))]
            self.world.say(f"FAULT a member dies in the commit of step {step}")
            self.world.at(0.0, lambda: self.die(self.world.rng.choice(group)))
        seen = all(w.newest is not None and w.newest.generation > view.generation for w in group)
        for worker in order:
            self.highest, self.last_commit_s = max(self.highest, step), self.world.now
            worker.committed = worker.parameters = step
            worker.base = worker.now = moved
            worker.held = {s: step for s, h in enumerate(moved) if worker.id in h.all}
            worker.kept = set()
            self._progress(worker, view)
            if seen:
                self.switch(worker)
        if len(order) == len(group) and step == self.world.play.ends_at:
            self._end_work(group)
        elif len(order) < len(group):
            for worker in group:
                worker.recovered = False  # nobody gets on without the next view
            self.world.at(1.0, lambda: [self.switch(w) for w in group if w.view is view and w.alive] and None)

    def _end_work(self, group: Sequence[SimWorker]) -> None:
        """Each member says so in its own time, then its script ends."""
        self.finishing = list(group)
        for worker in group:
            finishes_s = self.world.rng.choice((0.0, 0.1, self.world.rng.uniform(0, 6)))
            self.world.at(finishes_s, lambda worker=worker: self._finish(worker))  # type: ignore[misc]

    def _finish(self, worker: SimWorker) -> None:
        if worker.alive:
            digest = "another" if worker.id == self.world.play.altered else "the same"
            self.say(worker, Finished(step=worker.committed + 1, digest=digest))
            self.world.at(self.world.rng.uniform(0, 1), lambda: self.die(worker, code=0))

    def _progress(self, worker: SimWorker, view: View) -> None:
        holders = {str(s): h.all for s, h in enumerate(worker.now)}
        news = holders if holders != worker.told else None
        worker.told = holders
        self.say(worker, Progress(step=worker.committed, holders=news))

    def suspect(self, one: SimAgent, other: SimAgent) -> None:
        for here, there in ((one, other), (other, one)):
            for worker in [w for w in here.workers.values() if w.alive and w.view is not None]:
                for peer in [w for w in there.workers.values() if w.alive and w.view is not None]:
                    self.say(worker, Suspect(member=peer.id, reason="silence"))
