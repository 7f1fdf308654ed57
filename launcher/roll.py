"""What an agent knows: its workers, the other nodes, the view, how far the job is. The lowest layer of `core`.

State and questions about it; what follows from an event is decided in the layers above.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elastrain.agent_messages import Hello
from elastrain.launcher.faults import Fault
from elastrain.launcher.values import End, JobConfig, Node, NodeRecord, Parked, Roster, Stage, Worker
from elastrain.membership import Failure
from elastrain.world import Member, View

WARM_UP = "warm-up "
MEET = "meet "
RESTART = "restart of "
DIGESTS = "digests"


class Roll:
    """Holds the state; see the module's docstring. `choose` picks one of several members for `member:random`."""

    def __init__(self, config: JobConfig, faults: Sequence[Fault], choose: Callable[[Sequence[str]], str]) -> None:
        self.config = config
        self.workers: dict[str, Worker] = {}
        """This node's, the gone ones too."""
        self.nodes: dict[str, Node] = {}
        """The other nodes that take part."""
        self.record = NodeRecord(name=config.node, incarnation=config.incarnation, workers=config.workers)
        """What this node says of itself."""
        self.roster: Roster | None = None
        self.view: View | None = None
        self.spec: Mapping[str, Any] | None = None
        self.begun = False
        """A step has been committed, on this node or another."""
        self.step: int | None = None
        self.loss: float | None = None
        self.samples: int | None = None
        self.restarts = 0
        self.restarts_used = 0
        """Those that still count."""
        self.end: End | None = None
        self.reasons: list[str] = []
        self.parked: Parked | None = None
        """Why a change of the view waits, if one does."""
        self.store_away_since_s: float | None = None
        """Monotonic time since which the store has not answered; None while it does."""
        self._choose = choose
        self._faults = list(faults)
        self._failures: list[Failure] = []
        self._digests: dict[str, str] = {}
        """Of the parameters with which members have passed the end, on all nodes."""
        self._suspicions: dict[str, set[str]] = {}
        self._dead_elsewhere: set[str] = set()
        self._left: set[tuple[str, int]] = set()
        """Nodes (name, incarnation) that have gone in good order."""
        self._last_words = ""
        """How the last member of the view ended, if it was one of this node's."""
        self._roster_is_put = False
        self._proposing = False
        self._work_is_done = False
        self._vacancies: deque[tuple[int, str]] = deque()
        """Slots for which a number is on its way, and of whom."""
        self._unchecked: list[tuple[Worker, Hello]] = []
        self._deadlines_s: dict[str, float] = {}
        """"rendezvous", "last call", "join", "suspicion", "silence", "ask again", "parked", "digests", "meet NODE",
        "warm-up MEMBER", "restart of MEMBER", or a member that must leave by itself -> monotonic time."""

    @property
    def late(self) -> bool:
        """This node came when the job had begun."""
        me = self.config
        return self.roster is not None and self.roster.first_rank(me.node, me.incarnation) is None

    @property
    def blames_the_script(self) -> bool:
        """A worker that ends with an error would do so again: nothing has been committed, as far as this node knows.

        A node that came late knows too little: its own fault must not end a job that runs.
        """
        return not self.begun and not self.late

    @property
    def steps_lost(self) -> int:
        """Committed steps that some member of this node had to commit again."""
        return max((worker.redone_steps for worker in self.workers.values()), default=0)

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive]

    def next_deadline_s(self) -> float | None:
        return min(self._deadlines_s.values(), default=None)

    def first_unused_number(self) -> int:
        """No member that this agent has heard of bears it or a later one."""
        known = [*self.workers, *(self.view.ids if self.view else ())]
        initial = self.roster.workers if self.roster is not None else 0
        return max([initial, *(int(member.removeprefix("m")) + 1 for member in known)])

    def is_alive(self, member: str) -> bool:
        """Not proven dead."""
        worker = self.workers.get(member)
        if worker is not None:
            return worker.alive
        return member not in self._dead_elsewhere and not self._is_of_a_former_start(member)

    def _is_of_a_former_start(self, member: str) -> bool:
        """Its node's agent has been started again since, and no worker outlives its agent."""
        known = next((m for m in (self.view.members if self.view else ()) if m.id == member), None)
        if known is None:
            return False
        there = self.nodes.get(known.node)
        return known.node == self.config.node or (there is not None and there.record.incarnation > known.incarnation)

    def first_answering_node(self) -> str:
        """Of the nodes with members in the view; this one if there are none."""
        unlinked, me = self._unlinked_nodes(), self.config.node
        return next((m.node for m in (self.view.members if self.view else ()) if m.node not in unlinked), me)

    def _alive_in_view(self) -> list[str]:
        return [m for m in (self.view.ids if self.view else ()) if self.is_alive(m)]

    def _mine_in_view(self) -> list[Worker]:
        """This node's living members, in rank order."""
        found = [self.workers[m] for m in (self.view.ids if self.view else ()) if m in self.workers]
        return [worker for worker in found if worker.alive]

    def _unfinished(self) -> list[Worker]:
        return [worker for worker in self._mine_in_view() if not worker.finished]

    def _finishing(self) -> bool:
        return self._work_is_done or any(worker.finished for worker in self.workers.values())

    @property
    def holders(self) -> Mapping[str, Sequence[str]] | None:
        """Who holds what, by the newest word of this node's living members of the view; None if none has said it.

        Words of members that are gone are out of date: they count for nothing.
        """
        told = [worker for worker in self._mine_in_view() if worker.holders is not None]
        return max(told, key=lambda worker: worker.step or 0).holders if told else None

    def _unlinked_nodes(self) -> set[str]:
        """Nodes with members in the view whose agents do not answer."""
        names = {member.node for member in (self.view.members if self.view else ())} - {self.config.node}
        return {name for name in names if name not in self.nodes or not self.nodes[name].linked}

    def _as_member(self, worker: Worker) -> Member:
        here = self.config
        return Member(id=worker.id, node=here.node, address=worker.address, incarnation=here.incarnation)

    def _all_are_ready(self) -> bool:
        """All workers that this node has left; for the first view."""
        return bool(self.living) and not self._vacancies and all(worker.stage is Stage.READY for worker in self.living)

    def _last_traceback(self) -> str:
        return self._failures[-1].traceback if self._failures else ""

    def _reason(self, text: str) -> None:
        self.reasons = [*self.reasons, text][-8:]

    def _must_leave(self, worker: Worker, deadline_s: float) -> None:
        self._deadlines_s.setdefault(worker.id, deadline_s)
