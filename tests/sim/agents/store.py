"""The job's store: its content reaches each agent a little later, and in order; leases end; it can be away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from elastrain.job.world import View
from elastrain.launcher.core import agent_events as ev
from elastrain.launcher.shared.job_values import Command, NodeRecord, Propose, PutBegun, PutRoster, PutSpec, TakeNumber
from elastrain.launcher.shared.notices import Over
from elastrain.launcher.store.job_keys import JobKeys, decode_roster, decode_view
from elastrain.launcher.store.port import MemoryStore
from tests.sim.agents.actors import SimAgent
from tests.sim.agents.schedule import DISTRUST_S, LEASE_S

if TYPE_CHECKING:
    from tests.sim.agents.world import World


class SimStore:
    """Store and leases."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memory = MemoryStore()
        self.records: dict[str, NodeRecord] = {}
        self.slow = {name for name in (f"node{n}" for n in range(world.play.nodes)) if world.rng.random() < 0.1}
        """Nodes that hear late of what is in the store; links are quicker."""
        self.away = False
        self.distrust_until_s = 0.0

    def put_record(self, agent: SimAgent, record: NodeRecord) -> None:
        if agent.alive:
            self.records[agent.name] = record
            self.spread()

    def end_lease(self, agent: SimAgent, delay_s: float) -> None:
        def act() -> None:
            if self.away or self.world.now < self.distrust_until_s:
                self.end_lease(agent, max(0.5, self.distrust_until_s - self.world.now))
            elif self.records.get(agent.name, agent.core.cluster.peers.record).incarnation == agent.incarnation:
                self.records.pop(agent.name, None)
                self.spread()

        self.world.at(delay_s, act)

    def spread(self) -> None:
        """Everybody hears of what the store holds now, a little later, and in order."""
        items = {item.key.rpartition("/")[2]: item.value for item in self.memory.list("/elastrain/job/").items}
        records = dict(self.records)
        for agent in self.world.living():
            slow_s = self.world.rng.uniform(0, 3) if agent.name in self.slow else 0.0
            self.world.in_order(
                agent, "news", self.world.soon() + slow_s, lambda agent=agent: self._hear(agent, items, records)
            )  # type: ignore[misc]

    def _hear(self, agent: SimAgent, items: dict[str, bytes], records: dict[str, NodeRecord]) -> None:
        """As `PeerAgents._on_news` does."""
        if self.away:
            self.world.in_order(agent, "news", 0.5, lambda: self._hear(agent, items, records))
            return
        others = {name: record for name, record in records.items() if name != agent.name}
        gone = [name for name in agent.seen if name not in others]
        for name, record in others.items():
            if agent.seen.get(name) != record:
                self.world.happen(agent, ev.NodeCame(record=record))
        agent.seen = others
        if "begun" in items:
            self.world.happen(agent, ev.FirstCommitStands())
        if "spec" in items:
            self.world.happen(agent, ev.SpecStands(spec={"backups": self.world.play.backups}))
        if "view" in items:
            self.world.happen(agent, ev.ViewStands(view=decode_view(items["view"])))
        if "roster" in items:
            self.world.happen(agent, ev.RosterStands(roster=decode_roster(items["roster"])))
        if "end" in items:
            self.world.happen(agent, ev.EndStands(over=Over(**JobKeys.read(self.item("end")))))
        for name in gone:
            self.world.happen(agent, ev.LeaseEnded(node=name))

    def item(self, name: str) -> Any:
        return self.memory.get(f"/elastrain/job/{name}")

    def ask(self, agent: SimAgent, command: Command) -> None:
        """What is asked of a store that is away is asked again; only a proposal is answered at once."""
        if self.away:
            if isinstance(command, Propose):
                self._answer(agent, 1.0, ev.ProposalAnswered(view=None))
            else:
                self.world.at(0.5, lambda: self.ask(agent, command) if agent.alive else None)
            return
        keys, after_s = agent.keys, self.world.soon()
        match command:
            case Propose():
                self.world.checks.proposal(agent, command.view)
                self._answer(agent, after_s, ev.ProposalAnswered(view=keys.put_view(command.view)))
            case PutSpec():
                self._answer(agent, after_s, ev.SpecStands(spec=keys.put_spec(command.spec)))
            case PutRoster():
                self._answer(agent, after_s, ev.RosterStands(roster=keys.put_roster(command.roster)))
            case TakeNumber():
                number = keys.take_number("members", at_least=agent.core.cluster.first_unused_number())
                self._answer(agent, after_s, ev.NumberTaken(number=number))
            case PutBegun():
                keys.put_once("begun", {})
        self.spread()

    def _answer(self, agent: SimAgent, after_s: float, event: ev.Event) -> None:
        self.world.in_order(agent, "answers", after_s, lambda: self.world.happen(agent, event))

    def go_away(self, for_s: float) -> None:
        self.world.say(f"FAULT the store is away for {for_s:.1f} s")
        self.away = True
        for agent in self.world.living():
            self.world.happen(agent, ev.StoreWentAway(problem="away"))

        def back() -> None:
            self.away = False
            self.distrust_until_s = self.world.now + (DISTRUST_S if for_s > LEASE_S else 0.0)
            for agent in self.world.living():
                self.world.happen(agent, ev.StoreCameBack())

        self.world.at(for_s, back)

    def newest_view(self) -> View | None:
        item = self.item("view")
        return decode_view(item.value) if item is not None else None
