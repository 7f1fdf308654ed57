"""Every schedule of a very small job, breadth first: each order of deliveries, computations and views, and at each
point of it the death of each member with each part of what it had under way delivered.

Three members, two shards, one step, one fault: what is so small that nothing is left to chance. States that look alike
are explored once (`Fingerprints`), so that the shortest way to a violation is found first and needs no shrinking.
`python -m experiments.simulation.every` runs it from the command line.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elastrain import protocol as p
from tests.sim.checks import Truth
from tests.sim.cluster import Cluster, Scenario, truth_of
from tests.sim.member import Violation
from tests.sim.symbols import Ref

Action = tuple[Any, ...]
"""The key of a choice (see Cluster), or ("death", member, how much of each of its links is delivered)."""


class Steered(Cluster):
    """A job in which nothing is drawn: every choice is made from outside."""

    def __init__(self, scenario: Scenario, truth: Truth | None, *, at_once: bool = False) -> None:
        super().__init__(scenario, 0, truth)
        self.at_once = at_once
        """Loops and background work do at once what they have to do: only deliveries, views and deaths are free."""
        self.faults_left = scenario.crashes
        self.faults = []

    def actions(self) -> list[Action]:
        """What can happen next; empty at the end."""
        if self.lost or self.diverged:
            return []
        found = [_key(choice[0]) for choice in self._choices()]
        if found and self.faults_left:
            found += [death for name in self._victims() for death in self._deaths(name)]
        return found

    def act(self, action: Action) -> None:
        """Do one of `actions`. Raises Violation."""
        self.ticks += 1
        if action[0] == "death":
            self.faults_left -= 1
            self.struck += 1
            self._cuts = dict(action[2])
            self._die(action[1])
            return
        _, act, argument = next(choice for choice in self._choices() if _key(choice[0]) == action)
        act(argument)
        while self.at_once and self._compute_something():
            pass

    def _compute_something(self) -> bool:
        for choice in self._choices():
            if choice[0][0] in ("loop", "behind"):
                choice[1](choice[2])
                return True
        return False

    def end(self) -> None:
        """Raises Violation where nothing can happen any more although the job is not over."""
        self._check_end()

    def _victims(self) -> list[str]:
        living = self._living()
        return living if len(living) > 1 else []

    def _deaths(self, name: str) -> Iterator[Action]:
        """The death of a member now, with each possible part of what it had under way."""
        lengths = {to: len(self.links[name, to]) for to in self.members if self.links[name, to] and self._acts(to)}
        for kept in itertools.product(*(range(length + 1) for length in lengths.values())):
            yield ("death", name, tuple(zip(lengths, kept, strict=True)))

    def _die(self, victim: str) -> None:
        self._say(f"    {victim} dies")
        self.dead.add(victim)
        for to, kept in self._cuts.items():
            self.links[victim, to] = deque(list(self.links[victim, to])[:kept])
        self.agent_todo.append(self._consider)


def _key(key: Any) -> Action:
    return key if isinstance(key, tuple) else (key,)


_ADDRESS = 1 << 40
"""Keys above are addresses of objects, which are others in each play."""


class Fingerprints:
    """Digests of the state of a job.

    Two states with one digest have the same future, up to which of two buffers of equal content a reference names.
    """

    def of(self, job: Steered) -> bytes:
        state = [
            [(name, _Walk().digest(self._member(job, name))) for name in job.members],
            [(key, [_frame(frame) for frame in queue]) for key, queue in sorted(job.links.items()) if queue],
            sorted(job.dead),
            sorted(job.finished),
            job.ended,
            job.faults_left,
            len(job.agent_todo),
            job.view.generation,
            job.view.ids,
            job.lost,
            [m.id for m in job.joining],
        ]
        return hashlib.blake2b(repr(state).encode(), digest_size=12).digest()

    def _member(self, job: Steered, name: str) -> list[Any]:
        if name in job.dead or name in job.finished:
            return []
        member = job.members[name]
        loops = [getattr(part, "name", getattr(part, "__qualname__", "")) for part in job.loops[name]]
        return [member.core, member.ledger, member.symbols.model, member.loop, loops, list(job.views[name])]


def _frame(frame: p.Arrived) -> Any:
    payload = [(ref.sent, ref.place.value == ref.sent) for ref in frame.payload if isinstance(ref, Ref)]
    return (frame.generation, repr(frame.message), payload)


class _Walk:
    """Everything that can be reached from an object, as nested tuples; what was met before is named by its number."""

    def __init__(self) -> None:
        self._met: dict[int, int] = {}
        self._kept: list[Any] = []

    def digest(self, value: Any) -> str:
        return hashlib.blake2b(repr(self.flat(value)).encode(), digest_size=12).hexdigest()

    def flat(self, value: Any) -> Any:
        if value is None or isinstance(value, (int, float, str, bytes, enum.Enum)):
            return value
        if isinstance(value, type) or inspect.isroutine(value):
            return value.__qualname__  # not whose method it is: from there the whole job can be reached
        if isinstance(value, (tuple, list, deque)):
            return [self.flat(part) for part in value]
        if isinstance(value, (set, frozenset)):
            return ["set", *sorted(repr(self.flat(part)) for part in value)]
        if isinstance(value, Mapping):
            return self._mapping(value)
        return self._object(value)

    def _mapping(self, value: Mapping[Any, Any]) -> Any:
        if any(isinstance(key, int) and key > _ADDRESS for key in value):
            return ["by address", *sorted(repr(self.flat(part)) for part in value.values())]
        return sorted(((repr(key), self.flat(part)) for key, part in value.items()), key=lambda item: item[0])

    def _object(self, value: Any) -> Any:
        if id(value) in self._met:
            return ("met", self._met[id(value)])
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        fields = getattr(value, "__dict__", None)
        if fields is None:
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            fields = {name: getattr(value, name, None) for name in names}
        return (type(value).__name__, [(name, self.flat(part)) for name, part in fields.items()])


@dataclass
class Explored:
    states: int = 0
    ends: int = 0
    deepest: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    violation: str = ""
    schedule: tuple[Action, ...] = ()
    is_whole: bool = False
    seconds: float = 0.0


def explore(
    scenario: Scenario,
    *,
    limit: int = 10**9,
    at_once: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Explored:
    """All schedules, the short ones first; stops at the first violation or after `limit` states.

    With `at_once` nothing happens between two parts of a computation: a small part of all schedules.
    """
    truth = truth_of(Scenario(members=1, steps=scenario.steps, runs=scenario.runs, small=True))
    found, seen, prints = Explored(), set[bytes](), Fingerprints()
    began_s = time.monotonic()
    waiting: deque[tuple[Action, ...]] = deque([()])
    while waiting and found.states < limit and not found.violation:
        path = waiting.popleft()
        job = Steered(scenario, truth, at_once=at_once)
        try:
            for action in path:
                job.act(action)
            actions = job.actions()
            if not actions:
                job.end()
                found.ends += 1
                found.outcomes[job.outcome] = found.outcomes.get(job.outcome, 0) + 1
                continue
        except Violation as violation:
            found.violation, found.schedule = str(violation), path
            break
        seal = prints.of(job)
        if seal in seen:
            continue
        seen.add(seal)
        found.states += 1
        found.deepest = len(path)
        if found.states % 1000 == 0:
            tell(f"{found.states} states, {len(path)} events deep, {len(waiting)} paths wait")
        waiting.extend((*path, action) for action in actions)
    found.is_whole = not waiting and not found.violation
    found.seconds = round(time.monotonic() - began_s, 1)
    return found
