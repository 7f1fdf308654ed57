"""Who plays: an agent's core with what it has seen of the store, and members that know only who holds what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastrain.job.placement import Placement
from elastrain.job.values import Contribution, OpenWork, Record, Report
from elastrain.job.world import Member, View
from elastrain.launcher.core import Core
from elastrain.launcher.shared.job_values import NodeRecord
from elastrain.launcher.store.job_keys import JobKeys
from tests.sim.agents.schedule import SHARDS
from tests.support.agents import job_config

if TYPE_CHECKING:
    from tests.sim.agents.world import World


@dataclass(eq=False)
class SimWorker:
    """A member as far as views and holders go."""

    id: str
    agent: SimAgent
    member: Member
    alive: bool = True
    view: View | None = None
    newest: View | None = None
    recovered: bool = False
    committed: int = -1
    base: Placement | None = None
    now: Placement = ()
    parameters: int = -2
    held: dict[int, int] = field(default_factory=dict)
    """Shard -> the step that its state is of."""
    kept: set[int] = field(default_factory=set)
    """Shards whose gradient of the step after `committed` is here."""
    told: Any = None

    def report(self) -> Report:
        record = None if self.committed < 0 else record_of(self.committed)
        held = tuple((s, v, (self.committed + 1,) if s in self.kept else ()) for s, v in sorted(self.held.items()))
        return Report(
            wrong=None,
            committed=self.committed,
            record=record,
            base=self.base,
            parameters=(self.parameters,) * SHARDS,
            held=held,
            begun=self.committed + 1 if self.base is not None else -1,
            finishing=False,
            work=OpenWork(),
            own=((),),
            folded=(),
        )


def record_of(step: int) -> Record:
    return Record(step=step, generation=1, contribution=Contribution(), square_norm=0.0, skipped=False, switch=False)


class SimAgent:
    """One start of a node: its core, and what it has seen of the store."""

    def __init__(self, world: World, name: str, incarnation: int) -> None:
        play = world.play
        config = job_config(
            node=name, incarnation=incarnation, workers=play.workers, nodes_min=1 if play.nodes == 1 else play.nodes,
            nodes_max=play.nodes, spares=play.spares, max_restarts=1000, last_call_s=1.0, join_timeout_s=15.0,
        )  # fmt: skip
        self.core = Core(config, (), choose=lambda members: members[-1])
        self.world, self.name, self.incarnation = world, name, incarnation
        self.keys = JobKeys(world.store.memory, "job")
        self.seen: dict[str, NodeRecord] = {}
        self.workers: dict[str, SimWorker] = {}
        self.alive = True
        self.last_s: dict[Any, float] = {}
        """Channel -> when its last message comes: each is in order."""
        self.linked: set[tuple[str, int]] = set()

    def knows(self, other: SimAgent) -> bool:
        known = self.core.cluster.peers.nodes.get(other.name)
        return known is not None and known.record.incarnation == other.incarnation

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.incarnation
