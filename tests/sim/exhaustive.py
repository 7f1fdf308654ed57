"""Every schedule of a very small job, breadth first: each order of deliveries, computations and views, and at each
point of it the death of each member with each part of what it had under way delivered.

Three members, two shards, one step, one fault: what is so small that nothing is left to chance. The shortest way to a
violation is found first and needs no shrinking. `python -m experiments.simulation.every` runs it.

What makes it end: members are automata (`automata`), so that production code runs once for each state of a member and
not for each state of the job; a member dies only right after an event of its own, or at the beginning, because
whatever the others do in between does not depend on whether it has died meanwhile, with as much of its frames kept as
they have got by then; and of orders that come to the same one is enough (`reduction`). The agents' work may be done in
any order.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.cluster import Scenario
from tests.sim.member import Violation
from tests.sim.reduction import Reduction, leads_back, minded
from tests.sim.small_job import Action, Job, Rules


@dataclass
class Explored:
    states: int = 0
    member_states: int = 0
    transitions: int = 0
    ends: int = 0
    deepest: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    violation: str = ""
    schedule: tuple[str, ...] = ()
    is_whole: bool = False
    leads_back: bool = False
    """Whether the job can come back to a state that it has left: then a reduced search may miss something."""
    minded: int = 0
    """Events that a reduced search took for nothing, and that change something in a state that was met."""
    seconds: float = 0.0
    """Of computing."""


class Search:
    """Breadth first over the states of a job; with a reduction, over those that are needed."""

    def __init__(self, rules: Rules, reduction: Reduction | None) -> None:
        self._rules, self._reduction = rules, reduction
        self.found = Explored()
        self._victims: dict[int, int] = {}
        """Hash of a state met -> whose deaths in it are looked at, by bits."""
        self.ends: set[Job] = set()
        """States in which nothing can happen any more."""
        self._waiting: deque[tuple[Job, int, int]] = deque()
        """(state, victims to look at, its number); a state that was met before is there for more victims only."""
        self._ways: list[tuple[int, Action]] = []
        """By number: the state before, and what led from there."""

    def run(self, limit: int, tell: Callable[[str], None]) -> Explored:
        began_s, told = time.process_time(), 0
        everybody = (1 << len(self._rules.names)) - 1
        self._meet(self._rules.first(), everybody, -1, ())
        while self._waiting and self.found.states < limit and not self.found.violation:
            self._look(*self._waiting.popleft())
            if len(self._ways) >= told:
                told += 100_000
                tell(f"{self.found.states} states, {len(self._waiting)} wait")
        self.found.deepest = len(self._path(len(self._ways) - 1))
        self.found.is_whole = not self._waiting and not self.found.violation
        self.found.member_states = sum(len(each.faces) for each in self._rules.automata)
        if self._reduction is not None and self.found.is_whole:
            self.found.leads_back, self.found.minded = leads_back(self._rules), len(minded(self._rules))
        self.found.seconds = round(time.process_time() - began_s, 1)
        return self.found

    def _meet(self, job: Job, victims: int, before: int, action: Action) -> None:
        # Eight bytes for a state: of ten million, two have the same hash with a probability of three in a million.
        key = hash(job)
        known = self._victims.get(key)
        if known is None:
            self._victims[key] = victims
        elif victims & ~known:
            self._victims[key] = known | victims
        else:
            return
        self._waiting.append((job, victims if known is None else -1 - (victims & ~known), len(self._ways)))
        self._ways.append((before, action))

    def _look(self, job: Job, victims: int, number: int) -> None:
        rules, is_new = self._rules, victims >= 0
        actions = rules.actions(job) if is_new else []
        self.found.states += is_new
        if is_new and not actions:
            self._try(number, lambda: rules.check_end(job))
            self.ends.add(job)
            self._end("ok")
            return
        reduction, before = self._reduction, set[Action]()
        if reduction is not None and is_new:
            actions, before = reduction.needed(job, actions), reduction.take(job)
        for action in actions:
            self.found.transitions += 1
            self._try(number, lambda action=action: self._go(job, action, actions, action in before, number), action)  # type: ignore[misc]
        for death in rules.deaths(job, victims if is_new else -1 - victims):
            self.found.transitions += 1
            self._try(number, lambda death=death: self._go(job, death, actions, False, number), death)  # type: ignore[misc]

    def _go(self, job: Job, action: Action, others: list[Action], could_be_before: bool, number: int) -> None:
        after, acted, lost = self._rules.after(job, action)
        if lost:
            self._end("lost")
            return
        if self._reduction is not None:
            after = self._reduction.settled(after)
            if hash(after) not in self._victims:
                self._reduction.note(job, action, others, after)
        self._meet(after, 0 if could_be_before else acted, number, action)

    def _end(self, how: str) -> None:
        self.found.ends += 1
        self.found.outcomes[how] = self.found.outcomes.get(how, 0) + 1

    def _try(self, number: int, act: Callable[[], None], *last: Action) -> None:
        if self.found.violation:
            return
        try:
            act()
        except Violation as violation:
            self.found.violation = str(violation)
            self.found.schedule = tuple(map(self._rules.words, [*self._path(number), *last]))

    def _path(self, number: int) -> list[Action]:
        actions = deque[Action]()
        while number > 0:
            number, action = self._ways[number]
            actions.appendleft(action)
        return list(actions)


def explore(
    scenario: Scenario,
    *,
    limit: int = 10**9,
    at_once: bool = False,
    reduced: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Explored:
    """All schedules, the short ones first; stops at the first violation or after `limit` states.

    With `at_once` nothing happens between two parts of a computation: a small part of all schedules. `reduced`: of
    schedules that come to the same only one (`reduction`).
    """
    rules = Rules(scenario, at_once=at_once)
    return Search(rules, Reduction(rules) if reduced else None).run(limit, tell)
