"""What need not be looked at in a state of a very small job, because it comes to the same as what is looked at.

Two events of different members can change places where neither sees the other: each member has its own state, frames
are taken from one end of a link and put in at the other. So of the orders of such events one is enough:

* *After the last fault*: the events of one member (and the agents'), where nothing that the others can do before it
  acts again reaches it or is seen by anybody else. This is a persistent set, as in Godefroid's "Partial-Order Methods
  for the Verification of Concurrent Systems": every end of the job is kept, and every state of each member.
* *A member's death after an event of its own* is looked at where that event could not have come before the last event
  of another member. Where it could have, the death that follows upon it there leads here, too.
* *What changes nothing* happens at once: frames of views that their receivers have left, views that are no newer than a
  member's own, and members' wishes to read the view that stands, since they are told of it anyway.

An event is loud where it has an effect beside frames: commits, and what agents hear. Two things are taken for granted
and looked at when a search has ended: what is said to change nothing does so in every state that was met (`minded`),
and no order of events leads back to a state that was left (`leads_back`). A third is so by how `small_job` is made:
what it checks of several members at once is of records, reports and decisions, which are only ever added to, so that
what is wrong stays to be seen; or it is looked at in loud events.
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from typing import Any

from elastrain import protocol as p
from elastrain.job.world import View
from tests.sim.automata import READ, Face, Frame, Outcome
from tests.sim.member import Violation
from tests.sim.small_job import ACTS, Action, Job, Rules


class Reduction:
    """Asked in each state; remembers what others can do by themselves."""

    def __init__(self, rules: Rules) -> None:
        self._rules, self._count = rules, len(rules.names)
        self._reaches: dict[tuple[object, ...], bool] = {}
        self._before: dict[Job, set[Action]] = {}
        """State that waits to be looked at -> what could have happened before the last event that led there."""

    # ---- what nobody minds

    def settled(self, job: Job) -> Job:
        """The state without what changes nothing: frames of views that their receivers have left, views that are not
        newer than a member's own, and members' wishes to read the view, which all are told of anyway.
        """
        count, rules = self._count, self._rules
        generations = [rules.automata[m].faces[state].generation for m, state in enumerate(job.states)]
        values = rules.events.values
        links = tuple(
            tuple(frame for frame in link if values[frame].generation >= generations[at % count]) if link else link
            for at, link in enumerate(job.links)
        )
        views = tuple(
            tuple(view for view in waiting if values[view].generation > generations[member]) if waiting else waiting
            for member, waiting in enumerate(job.views)
        )
        agents = tuple(work for work in job.agents if not _is_reading(rules.work.values[work]))
        return job._replace(links=links, views=views, agents=agents)

    # ---- after the last fault

    def needed(self, job: Job, actions: list[Action]) -> list[Action]:
        """Those of the actions that have to be looked at."""
        if job.faults_left:
            return actions
        for member in range(self._count):
            # Where all that a member could do were to stay as it is, the others would be forgotten.
            mine = [action for action in actions if self.member_of(action) == member and not self._is_idle(job, action)]
            if mine and not any(self.is_loud(job, action) for action in mine) and not self._is_reached(job, member):
                return mine + [action for action in actions if self.member_of(action) is None]
        return actions

    def _is_reached(self, job: Job, member: int) -> bool:
        """Whether the others, while this member and the agents do nothing, send it a frame that would be its next one
        of theirs, or do anything that somebody else may see.
        """
        others = [other for other in range(self._count) if other != member and job.lives[other] == ACTS]
        if not others:
            return False
        count = self._count
        hears = tuple(not job.links[other * count + member] for other in others)
        inner = tuple(job.links[source * count + other] for other in others for source in range(count))
        views = tuple(job.views[other] for other in others)
        key = (member, job.states, job.lives, hears, inner, views, job.view, job.is_ended)
        if key not in self._reaches:
            self._reaches[key] = any(self._is_felt(job, member, *step) for step in self._alone(job, member))
        return self._reaches[key]

    def _alone(self, job: Job, member: int) -> Iterator[tuple[int, Job | None]]:
        """What the others can do by themselves: (who acts, state after it; None: it is loud, or something breaks)."""
        met, waiting = {job}, [job]
        while waiting:
            here = waiting.pop()
            for action in self._rules.actions(here):
                actor = self.member_of(action)
                if actor is None or actor == member:
                    continue
                after = self._quietly(here, action)
                yield actor, after
                if after is not None and after not in met:
                    met.add(after)
                    waiting.append(after)

    def _quietly(self, job: Job, action: Action) -> Job | None:
        try:
            return None if self.is_loud(job, action) else self.settled(self._rules.after(job, action)[0])
        except Violation:
            return None

    def _is_felt(self, begin: Job, member: int, actor: int, after: Job | None) -> bool:
        if after is None or after.lives != begin.lives:
            return True
        link = actor * self._count + member
        if after.links[link] and not begin.links[link]:
            return True
        faces = self._rules.automata[actor].faces
        return _seen(faces[begin.states[actor]]) != _seen(faces[after.states[actor]])

    # ---- before it

    def note(self, job: Job, action: Action, actions: list[Action], after: Job) -> None:
        """Note what could have happened before `action`, which led from the state `job` to `after`."""
        member = self.member_of(action)
        if job.faults_left and member is not None and not self.is_loud(job, action):
            others = [other for other in actions if self.member_of(other) not in (None, member)]
            quiet = {other for other in others if not self.is_loud(job, other)}
            self._before.setdefault(after, set()).update(quiet)

    def take(self, job: Job) -> set[Action]:
        """What could have happened before the last event that led to this state, whose deaths are looked at there."""
        return self._before.pop(job, set())

    # ---- actions

    def member_of(self, action: Action) -> int | None:
        """Whose event it is; None: the agents'."""
        match action:
            case ("deliver", at):
                return int(at) % self._count
            case ("view" | "own", member, *_):
                return int(member)
        return None

    def is_loud(self, job: Job, action: Action) -> bool:
        found = self._outcome(job, action)
        return bool(found.violation) or not all(
            effect == READ or isinstance(effect, p.Resumed) for effect in found.effects
        )

    def _is_idle(self, job: Job, action: Action) -> bool:
        """Whether it leaves the whole job as it was: copying, where there is nothing to copy just now."""
        member = self.member_of(action)
        return action[0] == "own" and member is not None and _is_nothing(job.states[member], self._outcome(job, action))

    def _outcome(self, job: Job, action: Action) -> Outcome:
        member = self.member_of(action)
        assert member is not None
        match action:
            case ("deliver", at):
                event = job.links[at][0]
            case ("view", _):
                event = job.views[member][0]
            case (_, _, wish):
                event = self._rules.events.of(wish)
        return self._rules.automata[member].next(job.states[member], event)


def _is_nothing(state: int, found: Outcome) -> bool:
    return found.state == state and not found.sent and not found.effects


def _is_reading(work: object) -> bool:
    return isinstance(work, tuple) and work[0] == READ


def _seen(face: Face) -> tuple[object, ...]:
    """What agents and other members can see of a member in a state, beside its frames."""
    return face.committed, face.base, face.view_ids, face.end_step, face.broken, face.cannot_make


def leads_back(rules: Rules) -> bool:
    """Whether events can lead the job back to a state: then a member could act for ever, and others be forgotten."""
    after: dict[Any, set[Any]] = {}
    for member, automaton in enumerate(rules.automata):
        for (state, event), found in automaton.outcomes.items():
            if found.state != state:
                after.setdefault((member, state), set()).add((member, found.state))
            elif isinstance(rules.events.values[event], str):
                if not _is_nothing(state, found):
                    return True  # an event of its own that leaves its state can happen again at once
            else:  # it stays in its state: no way back, unless its answer brings the same frame again
                after.setdefault(event, set()).update(frame for _, frame in found.sent)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return True
    return False


def minded(rules: Rules) -> list[str]:
    """What `Reduction.settled` has taken away and some member would have minded, in any state that was met."""
    found = []
    for member, automaton in enumerate(rules.automata):
        name = rules.names[member]
        for event, value in list(enumerate(rules.events.values)):
            if not isinstance(value, View) and (not isinstance(value, Frame) or value.to != name):
                continue
            lasts = isinstance(value, Frame)
            for state in range(len(automaton.faces)):
                if automaton.faces[state].generation >= value.generation + lasts:
                    outcome = automaton.next(state, event)
                    if outcome.state != state or outcome.sent or any(effect != READ for effect in outcome.effects):
                        found.append(f"{name} in state {state}: {value}")
    return found
