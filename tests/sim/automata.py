"""A member as an automaton: what an event makes of it depends on the state that it is in and on that event alone.

So each pair of state and event is played once, with the production core and ledger, however many states of the whole
job it is met in. What a member sees of others' memory are references: reading one is noted, and whoever plays the job
asks whether its owner still had there what it had sent.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elastrain import protocol as p
from elastrain.job.placement import Placement
from elastrain.job.values import Record, Recovery, Report
from elastrain.job.world import View
from elastrain.protocol.messages import Message
from tests.sim.checks import Checks, Truth
from tests.sim.cluster import Cluster, Scenario
from tests.sim.member import Outbox, SimMember, Violation
from tests.sim.symbols import Place, Ref

COPY, LOOP, BEHIND, ENDED = "copies", "loop", "behind", "ended"
"""Events beside frames and views: there is time for copies; the training loop, or background work, goes on by one
part; another member has passed the job's end."""
READ = "read"
"""The effect of a member that asks for the newest view."""
KEPT_ALIVE = 3000
"""So many members are kept as they are, to go on from; others are made anew by playing their events again."""
RefName = tuple[Any, ...]


@dataclass(frozen=True)
class Frame:
    """A message under way; `refs` name what comes beside it, the last part of a name is the content."""

    source: str
    to: str
    generation: int
    message: Message
    refs: tuple[RefName, ...]

    def __str__(self) -> str:
        return f"{self.source} -> {self.to}: {type(self.message).__name__}"


Event = Frame | View | str


class Sent:
    """A reference into another member's memory, as its reader holds it."""

    def __init__(self, name: RefName, noted: set[RefName]) -> None:
        self.name, self._noted = name, noted

    @property
    def value(self) -> Any:
        self._noted.add(self.name)
        return self.name[-1]


@dataclass(frozen=True)
class Face:
    """What agents, and the checks of the whole job, see of a member in some state."""

    committed: int
    base: Placement | None
    view_ids: tuple[str, ...]
    generation: int
    """Of its view; 0: it has none."""
    end_step: int | None
    wishes: tuple[str, ...]
    """Events of its own that can happen now."""
    broken: frozenset[RefName]
    """What it has sent and has overwritten or released since."""
    cannot_make: tuple[str, ...]
    """By shard: why it could not make the state after the step that is open first; empty: it can."""
    records: Mapping[int, Record]
    decisions: Mapping[int, Recovery]
    reports: Mapping[tuple[int, str], Report]
    roles: Mapping[tuple[int, int], Placement]


@dataclass(frozen=True)
class Outcome:
    """What an event makes of a state."""

    state: int
    frames: tuple[Frame, ...] = ()
    sent: tuple[tuple[str, int], ...] = ()
    """To whom, and the number of the frame."""
    read: tuple[RefName, ...] = ()
    effects: tuple[Any, ...] = ()
    """Commands that concern the whole job, in order."""
    violation: str = ""


class OwnChecks(Checks):
    """Those of one member; what takes others to check is told as an effect."""

    effects: list[Any]

    def command(self, member: SimMember, command: p.Command) -> None:
        if isinstance(command, p.Passed | p.Resumed):
            self.effects.append(command)
        super().command(member, command)

    def _same_settings(self, me: str, record: Record) -> None: ...

    def _all_holders_can_make(self, me: str, record: Record) -> None: ...

    def _each_run_once(self, view: View, recovery: Recovery) -> None: ...

    def can_make(self, member: SimMember, shard: int, step: int) -> str:
        try:
            self._can_make(member, shard, step)
        except Violation as violation:
            return str(violation)
        return ""


class Alone(Cluster):
    """One member of a job. `at_once`: its loop and its background work do at once what they have to do."""

    def __init__(self, scenario: Scenario, truth: Truth | None, name: str, *, at_once: bool) -> None:
        super().__init__(scenario, 0, truth)
        self._at_once = at_once
        self.name, self.me = name, self.members[name]
        self.members = {name: self.me}
        self.views.clear()
        self.faults = []
        self.checks = OwnChecks(self.shape, truth, self.members, self.dead)
        self.checks.only_joins = not scenario.crashes
        self.effects: list[Any] = []
        self.checks.effects = self.effects
        self.me.watch = self.checks.command
        self.noted: set[RefName] = set()
        self.given: dict[RefName, list[Place]] = {}

    def act(self, event: Event) -> Outcome:
        """Play the event; the outcome's `state` is for others to fill in."""
        self.noted.clear()
        self.effects.clear()
        try:
            self._begin(event)
            while self._at_once and self._goes_on():
                pass
        except Violation as violation:
            return Outcome(state=-1, read=tuple(self.noted), violation=str(violation))
        except Exception as error:  # noqa: BLE001  whatever it is, it is the finding
            return Outcome(state=-1, read=tuple(self.noted), violation=f"{type(error).__name__}: {error}")
        frames = self._frames()
        return Outcome(state=-1, frames=frames, read=tuple(self.noted), effects=tuple(self.effects))

    def _begin(self, event: Event) -> None:
        match event:
            case Frame():
                payload = [Sent(ref, self.noted) for ref in event.refs]
                told = {"generation": event.generation, "message": event.message, "payload": payload}
                self._feed(self.name, p.Arrived(source=event.source, **told))
            case View():
                self._feed(self.name, p.Viewed(view=event))
            case "copy":
                self._feed(self.name, p.CopiesAllowed(parameters_bytes=1 << 20))
            case "ended":
                self.loops[self.name].appendleft(p.JobEnded)
            case _:
                self._goes_on(event)

    def _goes_on(self, how: str = "") -> bool:
        """One part of what its loop or, else, its background work has to do; False: there is none."""
        if self.name in self.finished:
            return False
        if self.loops[self.name] and how != BEHIND:
            self._loop(self.name)
        elif self.me.has_work_behind:
            self._behind(self.name)
        else:
            return False
        return True

    def _wishes(self) -> tuple[str, ...]:
        if self.name in self.finished:
            return ()
        can = {COPY: bool(self.me.core.copying.takers)}
        if not self._at_once:
            can |= {LOOP: bool(self.loops[self.name]), BEHIND: self.me.has_work_behind}
        return tuple(event for event, is_so in can.items() if is_so)

    def _frames(self) -> tuple[Frame, ...]:
        made = []
        for (_, to), queue in self.links.items():
            made += [self._frame(to, arrived) for arrived in queue]
            queue.clear()
        return tuple(made)

    def _frame(self, to: str, arrived: p.Arrived) -> Frame:
        refs = [self._name_of(to, arrived, number, ref) for number, ref in enumerate(arrived.payload)]
        return Frame(self.name, to, arrived.generation, arrived.message, tuple(refs))

    def _name_of(self, to: str, arrived: p.Arrived, number: int, ref: Ref) -> RefName:
        if isinstance(ref.place, Sent):  # what it passes on lies in another's memory
            return ref.place.name
        name = (self.name, to, arrived.generation, repr(arrived.message), number, ref.sent)
        self.given.setdefault(name, []).append(ref.place)
        return name

    def _take(self, name: str, out: Outbox) -> None:
        self.effects += out.anew
        if out.read_view:
            self.effects.append(READ)
        super()._take(name, out)
        self.agent_todo.clear()

    def _failed(self, name: str, failure: p.Fail) -> None:
        self.effects.append(failure)
        self.finished.add(name)

    def _left(self, name: str, *, evicted: bool) -> None:
        self.effects.append(p.Leave(evicted=evicted))
        self.finished.add(name)

    def face(self) -> Face:
        me, checks = self.me, self.checks
        assert isinstance(checks, OwnChecks)
        step = self.shape.initial.step + 1
        return Face(
            committed=me.committed,
            base=me.roles.committed,
            view_ids=me.view.ids if me.view else (),
            generation=me.view.generation if me.view else 0,
            end_step=me.machine.end.step,
            wishes=self._wishes(),
            broken=frozenset(name for name, at in self.given.items() if any(one.value != name[-1] for one in at)),
            cannot_make=tuple(checks.can_make(me, shard, step) for shard in range(len(self.shape.shards))),
            records=dict(checks.records),
            decisions=dict(checks.decisions),
            reports=dict(checks.reports),
            roles=dict(checks.roles),
        )

    def digest(self, face: Face) -> bytes:
        """Of all that its future depends on, and of what it has shown to others."""
        me = self.me
        loops = [getattr(part, "name", getattr(part, "__qualname__", "")) for part in self.loops[self.name]]
        own = [me.core, me.ledger, me.symbols.model, me.loop, loops, sorted(self.finished)]
        shown = [face.records, face.decisions, face.reports, face.roles, sorted(map(repr, face.broken))]
        return hashlib.blake2b(repr((_Walk().flat(own), repr(shown))).encode(), digest_size=16).digest()


class Numbers:
    """Values by number, those that look alike by one."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[str, int] = {}

    def of(self, value: Any) -> int:
        number = self._numbers.setdefault(repr(value), len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Automaton:
    """All states of one member that were met so far: numbers, from 0. `events` are numbers, too."""

    def __init__(self, new: Callable[[], Alone], events: Numbers) -> None:
        self._new, self._events = new, events
        self.faces: list[Face] = []
        self.played = 0
        """Pairs of a state and an event."""
        self._numbers: dict[bytes, int] = {}
        self.outcomes: dict[tuple[int, int], Outcome] = {}
        """(state, event) -> what has come of it."""
        self._origins: list[tuple[int, int]] = []
        """Of each state: a state before it, and the event that led from there to it."""
        self._alive: OrderedDict[int, Alone] = OrderedDict()
        self._enter(self._new(), -1, -1)

    def next(self, state: int, event: int) -> Outcome:
        found = self.outcomes.get((state, event))
        if found is None:
            found = self.outcomes[state, event] = self._play(state, event)
        return found

    def _play(self, state: int, event: int) -> Outcome:
        self.played += 1
        member = self._alive.pop(state, None) or self._again(state)
        found = member.act(self._events.values[event])
        if found.violation:
            return found
        sent = tuple((frame.to, self._events.of(frame)) for frame in found.frames)
        return replace(found, state=self._enter(member, state, event), sent=sent)

    def _enter(self, member: Alone, before: int, event: int) -> int:
        face = member.face()
        number = self._numbers.setdefault(member.digest(face), len(self.faces))
        if number == len(self.faces):
            self.faces.append(face)
            self._origins.append((before, event))
        self._alive[number] = member
        if len(self._alive) > KEPT_ALIVE:
            self._alive.popitem(last=False)
        return number

    def _again(self, state: int) -> Alone:
        """A member in that state: made anew, with all events that led there played again."""
        events = deque[int]()
        while state > 0:
            state, event = self._origins[state]
            events.appendleft(event)
        member = self._new()
        for event in events:
            member.act(self._events.values[event])
        return member


_ADDRESS = 1 << 40
"""Keys above are addresses of objects, which are others in each play."""


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
        if isinstance(value, Sent):
            return (
                "sent",
                self.flat(value.name),
            )  # what is noted of its reads is the play's own, and new in each event
        if id(value) in self._met:
            return ("met", self._met[id(value)])
        self._met[id(value)] = len(self._met)
        self._kept.append(value)
        fields = getattr(value, "__dict__", None)
        if fields is None:
            names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
            fields = {name: getattr(value, name, None) for name in names}
        return (type(value).__name__, [(name, self.flat(part)) for name, part in fields.items()])
