"""A very small job as a value: what can happen in a state of it, and what comes of that.

Members are automata (`automata`); agents decide with the code of `cluster`, from what they see of members. A state is
a tuple of numbers, so that millions of them can be told apart.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

from elastrain import protocol as p
from elastrain.job.world import View
from tests.sim.automata import ENDED, READ, Alone, Automaton, Face, Numbers, Outcome
from tests.sim.checks import Checks, content
from tests.sim.cluster import Cluster, Scenario, truth_of
from tests.sim.member import Violation

Action = tuple[Any, ...]
"""What happens next: (kind, member or link or piece of the agents' work, …)."""
ACTS, DEAD, FINISHED = range(3)
CONSIDER, HEAR = "consider", "hear"


class Job(NamedTuple):
    """A state of the whole job, in numbers; members in order."""

    states: tuple[int, ...]
    lives: tuple[int, ...]
    links: tuple[tuple[int, ...], ...]
    """By (from, to): frames under way."""
    views: tuple[tuple[int, ...], ...]
    """Those that a member has still to hear of."""
    agents: tuple[int, ...]
    """What agents have still to do."""
    view: int
    is_ended: bool
    faults_left: int


class Agents(Cluster):
    """The agents of a job, and what they see of its members; made for one event."""

    def __init__(self, scenario: Scenario, shape: Any, names: list[str], faces: list[Face], lives: list[int]) -> None:
        self.scenario, self.shape, self.tell, self.ticks = scenario, shape, None, 0
        self.members = {name: _seen(face) for name, face in zip(names, faces, strict=True)}  # type: ignore[misc]
        self.dead = {name for name, life in zip(names, lives, strict=True) if life == DEAD}
        self.finished = {name for name, life in zip(names, lives, strict=True) if life == FINISHED}
        self.asleep, self.cut_off, self.stalled, self.joining = {}, {}, {}, []
        self.flipped, self.slipped, self.lost, self.diverged, self.ended = set(), set(), "", "", False
        self.agent_todo, self.views, self.loops = deque(), defaultdict(deque), defaultdict(deque)

    def see(self, view: View, *, is_ended: bool) -> None:
        self.view, self.ended = view, is_ended
        self.removed = [name for name in self.members if name not in view]

    def do(self, work: Any) -> None:
        """A piece of the agents' work, or what a member tells the world outside."""
        match work:
            case p.BeginAnew():
                self._begin_anew(work)
            case (_, name, p.Fail() as failure):
                self._failed(name, failure)
            case (_, name, p.Leave() as leave):
                self._left(name, evicted=leave.evicted)
            case (_, name):
                self.views[name].append(self.view)
            case _:
                self._consider()

    def _die(self, victim: str) -> None:
        raise Violation(f"{victim} ends by itself")

    def _join(self) -> None:
        raise Violation("the job begins anew with another member")


def _seen(face: Face) -> SimpleNamespace:
    """A member, as far as agents ask it anything."""
    return SimpleNamespace(
        committed=face.committed,
        roles=SimpleNamespace(committed=face.base),
        view=SimpleNamespace(ids=face.view_ids) if face.view_ids else None,
        machine=SimpleNamespace(
            checkpointing=SimpleNamespace(open=None, is_over=lambda step: True),
            end=SimpleNamespace(step=face.end_step, is_checkpoint_wished=False),
        ),
        drift="",
    )


class Draft:
    """A state of the job that is being changed."""

    def __init__(self, job: Job) -> None:
        self.states, self.lives = list(job.states), list(job.lives)
        self.links, self.views = list(job.links), list(job.views)
        self.agents, self.view = list(job.agents), job.view
        self.is_ended, self.faults_left = job.is_ended, job.faults_left
        self.lost = ""
        """Why nothing happens any more, where the job has ended with a sentence."""

    def job(self) -> Job:
        count = len(self.lives)
        for member in [at for at, life in enumerate(self.lives) if life != ACTS]:
            self.views[member] = ()  # nobody reads it any more
            for source in range(count):
                self.links[source * count + member] = ()
        return Job(
            states=tuple(self.states),
            lives=tuple(self.lives),
            links=tuple(self.links),
            views=tuple(self.views),
            agents=tuple(sorted(self.agents)),
            view=self.view,
            is_ended=self.is_ended,
            faults_left=self.faults_left,
        )


class Rules:
    """What can happen in a state of the job, and what comes of it."""

    def __init__(self, scenario: Scenario, *, at_once: bool) -> None:
        self.scenario = scenario
        truth = truth_of(Scenario(members=1, steps=scenario.steps, runs=scenario.runs, small=True))
        whole = Cluster(scenario, 0, truth)
        self.shape, self.names, self._at = whole.shape, list(whole.members), {n: i for i, n in enumerate(whole.members)}
        self.events, self.work = Numbers(), Numbers()
        make = [partial(Alone, scenario, truth, name, at_once=at_once) for name in self.names]
        self.automata = [Automaton(each, self.events) for each in make]
        self._agreed: dict[tuple[int, int, int, int], str] = {}
        self._decided: dict[Any, tuple[int, bool, str, list[int], list[tuple[int, ...]]]] = {}
        self._handed_out: set[tuple[int, ...]] = set()
        """States of the members in which each run was seen to be done by somebody, and by nobody twice."""
        self._ended = self.events.of(ENDED)
        self.first_view = self.events.of(whole.view)

    def first(self) -> Job:
        count = len(self.names)
        return Job(
            states=(0,) * count,
            lives=(ACTS,) * count,
            links=((),) * (count * count),
            views=((self.first_view,),) * count,
            agents=(),
            view=self.first_view,
            is_ended=False,
            faults_left=self.scenario.crashes,
        )

    # ------------------------------------------------------------------------------------------- what can happen

    def actions(self, job: Job) -> list[Action]:
        """All but deaths."""
        count = len(self.names)
        found: list[Action] = [("deliver", at) for at, link in enumerate(job.links) if link]
        for member in range(count):
            if job.lives[member] == ACTS:
                found += [("view", member)] if job.views[member] else []
                face = self.automata[member].faces[job.states[member]]
                found += [("own", member, wish) for wish in face.wishes]
        return [*found, *(("agents", work) for work in dict.fromkeys(job.agents))]

    def deaths(self, job: Job, victims: int) -> Iterator[Action]:
        """Of members, by bits, with each possible part of what each had under way."""
        view, count = self.events.values[job.view], len(self.names)
        living = [m for m in range(count) if job.lives[m] == ACTS and self.names[m] in view]
        if not job.faults_left or len(living) < 2:
            return
        for victim in [m for m in living if victims >> m & 1]:
            lengths = [len(link) for link in job.links[victim * count : (victim + 1) * count]]
            for kept in itertools.product(*(range(length + 1) for length in lengths)):
                yield ("death", victim, kept)

    # ------------------------------------------------------------------------------------------- what comes of it

    def after(self, job: Job, action: Action) -> tuple[Job, int, str]:
        """The state after it, who has acted (by bits), and why the job has ended, if so. Raises Violation."""
        draft, acted = Draft(job), 0
        match action:
            case ("deliver", at):
                event, *rest = draft.links[at]
                draft.links[at] = tuple(rest)
                acted = self._act(draft, at % len(self.names), event)
            case ("view", member):
                event, *rest = draft.views[member]
                draft.views[member] = tuple(rest)
                acted = self._act(draft, member, event)
            case ("own", member, wish):
                acted = self._act(draft, member, self.events.of(wish))
            case ("agents", work):
                draft.agents.remove(work)
                self._with_agents(draft, work)
            case ("death", victim, kept):
                self._kill(draft, victim, kept)
        return draft.job(), acted, draft.lost

    def _kill(self, draft: Draft, victim: int, kept: tuple[int, ...]) -> None:
        draft.lives[victim] = DEAD
        draft.faults_left -= 1
        first = victim * len(self.names)
        for to, length in enumerate(kept):
            draft.links[first + to] = draft.links[first + to][:length]
        draft.agents.append(self.work.of(CONSIDER))

    def _act(self, draft: Draft, member: int, event: int) -> int:
        """A member meets an event, and all others what follows at once; who has acted."""
        found = self.automata[member].next(draft.states[member], event)
        wrong = found.violation or self._overwritten(draft, found)
        if wrong:
            if self.names[member] in self.events.values[draft.view]:
                raise Violation(wrong)
            draft.lives[member] = FINISHED  # a member that was removed may read what others have released
            return 1 << member
        draft.states[member] = found.state
        for to, frame in found.sent:
            at = member * len(self.names) + self._at[to]
            draft.links[at] = (*draft.links[at], frame)
        self._check(draft, member, found)
        return 1 << member | self._tell(draft, member, found)

    def _overwritten(self, draft: Draft, found: Outcome) -> str:
        for name in found.read:
            owner = self._at[name[0]]
            if name in self.automata[owner].faces[draft.states[owner]].broken:
                return f"{name[3]} of {name[0]} was released or overwritten before it was read"
        return ""

    def _tell(self, draft: Draft, member: int, found: Outcome) -> int:
        """What of it concerns the agents; whom it has set going."""
        name, acted, was_ended = self.names[member], 0, draft.is_ended
        for effect in found.effects:
            if isinstance(effect, p.BeginAnew):
                draft.agents.append(self.work.of(effect))
            elif effect == READ:
                draft.agents.append(self.work.of((READ, name)))
            elif isinstance(effect, p.Fail | p.Leave):
                self._with_agents(draft, self.work.of((HEAR, name, effect)))
        if draft.is_ended and not was_ended:
            for other in range(len(self.names)):
                if draft.lives[other] == ACTS:
                    acted |= self._act(draft, other, self._ended)
        return acted

    def _with_agents(self, draft: Draft, work: int) -> None:
        key = (work, tuple(draft.states), tuple(draft.lives), draft.view, draft.is_ended)
        if key not in self._decided:
            self._decided[key] = self._decide(draft, work)
        draft.view, draft.is_ended, draft.lost, finished, views = self._decided[key]
        for member in finished:
            draft.lives[member] = FINISHED
        draft.views = [(*waiting, *new) for waiting, new in zip(draft.views, views, strict=True)]

    def _decide(self, draft: Draft, work: int) -> tuple[int, bool, str, list[int], list[tuple[int, ...]]]:
        """View, whether the job has ended, why it is lost, who has finished, and the views to be told to each."""
        faces = [self.automata[m].faces[state] for m, state in enumerate(draft.states)]
        agents = Agents(self.scenario, self.shape, self.names, faces, draft.lives)
        agents.see(self.events.values[draft.view], is_ended=draft.is_ended)
        agents.do(self.work.values[work])
        finished = [m for m, name in enumerate(self.names) if name in agents.finished]
        views = [tuple(map(self.events.of, agents.views[name])) for name in self.names]
        return self.events.of(agents.view), agents.ended, agents.lost or agents.diverged, finished, views

    # ------------------------------------------------------------------------------------------- what must hold

    def _check(self, draft: Draft, member: int, found: Outcome) -> None:
        mine = self.automata[member].faces[found.state]
        others = [m for m in range(len(self.names)) if m != member]
        for other in others:
            wrong = self._disagreement(member, found.state, other, draft.states[other])
            if wrong:
                raise Violation(wrong)
        faces = [self.automata[m].faces[draft.states[m]] for m in range(len(self.names))]
        for effect in found.effects:
            if isinstance(effect, p.Passed) and not any(effect.record.step in faces[m].records for m in others):
                self._check_holders(draft, mine, faces)
            if isinstance(effect, p.Resumed) and not any(effect.view.generation in faces[m].decisions for m in others):
                self._check_runs(effect, draft, faces)

    def _check_runs(self, effect: p.Resumed, draft: Draft, faces: list[Face]) -> None:
        if tuple(draft.states) not in self._handed_out:
            checks = Checks(self.shape, None, {}, ())
            checks.reports = {at: report for face in faces for at, report in face.reports.items()}
            checks._each_run_once(effect.view, effect.recovery)
            self._handed_out.add(tuple(draft.states))

    def _check_holders(self, draft: Draft, mine: Face, faces: list[Face]) -> None:
        """At the first commit each living holder has the state after the step, or can make it."""
        for shard, holders in enumerate(mine.base or ()):
            for holder in [self._at[name] for name in holders.all if name in mine.view_ids]:
                if draft.lives[holder] != DEAD and (wrong := faces[holder].cannot_make[shard]):
                    raise Violation(wrong)

    def _disagreement(self, one: int, state: int, other: int, theirs: int) -> str:
        """Whether two members, each in some state, have come to different ends of anything; asked once per pair."""
        key = (one, state, other, theirs) if one < other else (other, theirs, one, state)
        if key not in self._agreed:
            faces = (self.automata[key[0]].faces[key[1]], self.automata[key[2]].faces[key[3]])
            self._agreed[key] = _difference(*faces, self.names[key[0]], self.names[key[2]])
        return self._agreed[key]

    def check_end(self, job: Job) -> None:
        """Raises Violation where nothing can happen any more although the job is not over."""
        view = self.events.values[job.view]
        waiting = [name for m, name in enumerate(self.names) if name in view and job.lives[m] == ACTS]
        if waiting:
            raise Violation(f"stuck: {', '.join(waiting)} wait for ever")

    def words(self, action: Action) -> str:
        """An action, for people."""
        count = len(self.names)
        match action:
            case ("deliver", at):
                return f"{self.names[at // count]} -> {self.names[at % count]}"
            case ("agents", work):
                return f"agents: {self.work.values[work]}"
            case (kind, member, *more):
                return f"{kind} {self.names[member]} {more or ''}".rstrip()
        return str(action)


def _difference(one: Face, other: Face, name: str, its_name: str) -> str:
    for step in one.records.keys() & other.records.keys():
        mine, theirs = one.records[step], other.records[step]
        if content(mine) != content(theirs):
            return f"{name} and {its_name} commit step {step} with different contents"
        if mine.generation == theirs.generation and mine != theirs:
            return f"{name} and {its_name} hold different records of step {step}"
    for generation in one.decisions.keys() & other.decisions.keys():
        if one.decisions[generation] != other.decisions[generation]:
            return f"{name} and {its_name} decided differently in generation {generation}"
    for at in one.roles.keys() & other.roles.keys():
        if one.roles[at] != other.roles[at]:
            return f"{name} and {its_name} see different holders after step {at[1]} in generation {at[0]}"
    return ""
