"""Short jobs with a directed fault, told event by event: what tests/sim/transcripts records for readers.

`python -m tests.sim.stories NAME` prints one. The members and agents are the production cores. Nothing is drawn:
whoever can act does so in a fixed order, messages first, so that a story changes only where the protocol does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any
from unittest.mock import patch

from elastrain import protocol as p
from elastrain.job.fold import Combine
from elastrain.job.placement import Holders
from elastrain.job.values import Check, OpenWork, Record, Recovery, Shape, ShardShape
from elastrain.job.world import View
from elastrain.launcher.core import agent_events
from elastrain.launcher.shared.job_values import Command as AgentCommand
from elastrain.launcher.shared.job_values import Log
from tests.sim import agents
from tests.sim.cluster import Choice, Cluster, Scenario, truth_of

SHAPE = Shape(
    runs=4,
    blocks=2,
    shards=(ShardShape(size_bytes=8, lanes=(0,)), ShardShape(size_bytes=8, lanes=(1,))),
    backups=1,
)
Moment = tuple[Callable[[Any], bool], str, Callable[[Any], None]]
"""When something happens, what it is in words, and how it is done."""

# ------------------------------------------------------------------------------------------------------ in one line

HIDDEN = {
    *(
        "payload",
        "contribution",
        "touched",
        "square_norms",
        "settings",
        "state",
        "base",
        "reason",
        "checks",
        "sums",
        "at_s",
    ),
    *("checkpoint", "writing"),
    *("loss_scale", "digest", "told", "target", "own", "is_checking", "index", "turn", "needed", "before", "traceback"),
    *("address", "loss", "weight", "incarnation", "spec"),
}
"""Numbers, and what is told elsewhere."""
DIGESTS = {"digests", "published", "parameters"}
"""Of these only the shards are told."""


def line_of(value: Any) -> str:
    """A value of the protocol, without what only machines compare."""
    if isinstance(value, p.Arrived):
        return f"{line_of(value.message)} from {value.source}"
    if isinstance(value, p.SendMessage):
        return f"to {value.to}: {line_of(value.message)}"
    return " ".join([type(value).__name__, *_fields(value)])


def _names(value: Any) -> tuple[str, ...]:
    """Its fields, where it is a dataclass or a message of the agents' wire."""
    return tuple(f.name for f in fields(value)) if is_dataclass(value) else getattr(value, "__struct_fields__", ())


def _fields(value: Any) -> list[str]:
    return [text for name in _names(value) if (text := _field(name, value))]


def _field(name: str, owner: Any) -> str:
    value = getattr(owner, name)
    if isinstance(value, OpenWork):
        return " ".join(_fields(value))
    if name in HIDDEN or value is None or value is False or _is_empty(value):
        return ""
    if value is True:
        return name
    if name in DIGESTS and isinstance(value, Mapping):
        value = tuple(value)
    elif name in DIGESTS and isinstance(value[0], tuple):
        value = tuple(shard for shard, _ in value)
    elif name == "digests":
        return ""
    return f"{name}={_short(value)}"


def _is_empty(value: Any) -> bool:
    """Whether there is nothing in it, at any depth."""
    if isinstance(value, Mapping):
        return all(map(_is_empty, value.values()))
    return isinstance(value, str | tuple | list | frozenset | set) and not value


def _short(value: Any) -> str:
    match value:
        case View():
            return f"{value.generation}({' '.join(value.ids)})"
        case Record():
            return f"record-of-{value.step}"
        case Holders():
            return "+".join(value.all)
        case Combine():
            return f"{value.left}+{value.right}"
        case Enum():
            return str(value.value)
        case Mapping():
            return "{" + ", ".join(f"{key}: {_short(item)}" for key, item in value.items()) + "}"
        case tuple() | list():
            return "(" + ", ".join(map(_short, value)) + ")"
        case set() | frozenset():
            return "(" + ", ".join(sorted(map(_short, value))) + ")"
    if _names(value):
        kind = [] if isinstance(value, Recovery | Check) else [type(value).__name__]
        return f"[{' '.join([*kind, *_fields(value)])}]"
    return str(value)


def _first_sentence(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


class Teller:
    """Lines of a story. What is named for the first time is explained by its own docstring."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.is_telling = False
        self._known: set[type] = set()

    def note(self, text: str) -> None:
        self.lines += ["", f"# {text}", ""]

    def say(self, indent: str, text: str, *values: Any) -> None:
        if not self.is_telling:
            return
        self.lines.append(f"{indent}{text}")
        for value in values:
            kind = type(value)
            if kind not in self._known and kind.__doc__ and not kind.__doc__.startswith(kind.__name__ + "("):
                self._known.add(kind)
                self.lines.append(f"{indent}    | {kind.__name__}: {_first_sentence(kind)}")


# ------------------------------------------------------------------------------------------------------- of members


class Story(Cluster):
    """A job of a few members; told from the first commit on, unless `from_start`."""

    def __init__(self, members: int, *moments: Moment, steps: int = 3, from_start: bool = False) -> None:
        self.teller = Teller()
        self._moments = list(moments)
        self._from_start = from_start
        self._last_act: dict[str, int] = {}
        scenario = Scenario(members=members, steps=steps, runs=SHAPE.runs, backups=SHAPE.backups)
        with patch("tests.sim.cluster.shape_of", lambda scenario: SHAPE):
            super().__init__(scenario, 0, truth_of(scenario))
        self.checks.only_joins = False

    def _start(self) -> Any:
        member = super()._start()
        core = self.members[member.id].core
        core.handle = partial(self._handle, member.id, core.handle)  # type: ignore[method-assign]
        return member

    def _handle(self, name: str, handle: Callable[[p.Event], list[p.Command]], event: p.Event) -> list[p.Command]:
        """Tell what goes into a core and what comes out."""
        said = event.message if isinstance(event, p.Arrived) else event
        commands = handle(event)
        self.teller.say("", f"{name} <- {line_of(event)}", said)
        for command in commands:
            said = command.message if isinstance(command, p.SendMessage) else command
            self.teller.say("          ", line_of(command), said)
        return commands

    def _die(self, victim: str) -> None:
        super()._die(victim)
        for source in list(self.links):  # nothing of what was under way arrives
            if source[0] == victim:
                self.links[source].clear()

    def _choices(self) -> list[Choice]:
        """Views first, then messages, then the agent, work behind, and the loop that has waited longest."""
        ranks = {"view": 0, "agent": 2, "behind": 3, "loop": 4}
        choices = super()._choices()

        def rank(choice: Choice) -> tuple[int, int]:
            key = choice[0]
            kind = key if isinstance(key, str) else key[0]
            waited = self._last_act.get(choice[2], 0) if kind == "loop" else 0
            return ranks.get(kind, 1), waited

        return sorted(choices, key=rank)

    def _choose(self, choices: list[Choice]) -> Choice:
        choice = choices[0]
        if choice[0][0] == "loop":
            self._last_act[choice[2]] = self.ticks
        return choice

    def _strike(self) -> None:
        self.teller.is_telling = self.teller.is_telling or self._from_start or self.committed >= 0
        while self._moments and self._moments[0][0](self):
            _, text, act = self._moments.pop(0)
            self.teller.note(text)
            act(self)


def _is_in_backward(member: str, step: int) -> Callable[[Story], bool]:
    """One block of the member's first run of the step has its gradient, the other one has not."""

    def is_so(job: Story) -> bool:
        runs = job.members[member].machine.step.runs
        ends = [bool(partials.nodes) for partials in runs.own]
        return runs.step == step and any(ends) and not all(ends)

    return is_so


def _is_recovering(job: Story) -> bool:
    return job.view.generation > 1 and any(job.members[m].machine.views.is_recovering for m in job.view.ids[:1])


def _in_step(step: int) -> Callable[[Story], bool]:
    return lambda job: all(job.members[m].machine.loop.step == step for m in job.view.ids)


def one_step() -> Story:
    return Story(2, steps=1, from_start=True)


def kill_in_backward() -> Story:
    return Story(
        3,
        (_is_in_backward("m1", 1), "m1 is killed in the middle of a backward.", lambda job: job._die("m1")),
        (lambda job: job.view.generation == 2, "The agent of m1 has seen it die: a view without it.", lambda job: None),
    )


def loss_during_recovery() -> Story:
    return Story(
        4,
        (_is_in_backward("m1", 1), "m1 is killed in the middle of a backward.", lambda job: job._die("m1")),
        (_is_recovering, "m2 is killed while the others recover from that.", lambda job: job._die("m2")),
        steps=3,
    )


def join() -> Story:
    return Story(2, (_in_step(1), "A third worker is started; the agent adds it to the view.", lambda job: job._join()))


def join_and_loss() -> Story:
    return Story(
        2,
        (_in_step(1), "A third worker is started; the agent adds it to the view.", lambda job: job._join()),
        (
            lambda job: job.view.generation == 2 and job.members["m0"].machine.views.newest == job.view,
            "m1 is killed before the step is committed whose record would have let m2 in.",
            lambda job: job._die("m1"),
        ),
    )


# -------------------------------------------------------------------------------------------------------- of agents


class ParkedAndBack(agents.World):
    """Two nodes of one worker each. The store goes away, then a worker dies: nobody may decide, until it is back."""

    SECONDS = (8.0, 20.0)
    """What is told."""

    def __init__(self) -> None:
        self.teller = Teller()
        play = agents.Play(nodes=2, workers=1, backups=1, faults=0, one_host=True, burst=False)
        super().__init__(3, play, faults=ParkedAndBack._faults)

    def _faults(self) -> None:
        self.at(8.0, lambda: self._do("The store goes away.", lambda: self.store.go_away(7.0)))
        self.at(9.0, lambda: self._do("The worker of node1 is killed.", self._kill))
        self.at(15.0, lambda: self.teller.note("The store is back."))

    def _do(self, text: str, act: Callable[[], None]) -> None:
        self.teller.note(text)
        act()

    def _kill(self) -> None:
        self.members.die(next(worker for worker in self.members.living() if worker.agent.name == "node1"))

    def happen(self, agent: agents.SimAgent, event: agent_events.Event) -> None:
        commands = agent.core.handle(event, self.now)
        first, last = self.SECONDS
        self.teller.is_telling = first <= self.now <= last and bool(commands)
        self.teller.say("", f"{self.now:7.3f}  {agent.name} <- {line_of(event)}", event)
        self._tell_commands(commands)
        super().do(agent, commands)

    def do(self, agent: agents.SimAgent, commands: Any) -> None:
        if commands:
            self.teller.say("", f"{self.now:7.3f}  {agent.name} has waited long enough")
        self._tell_commands(commands)
        super().do(agent, commands)

    def _tell_commands(self, commands: Any) -> None:
        for command in commands:
            self.teller.say("          ", _agent_line(command), command)


def _agent_line(command: AgentCommand) -> str:
    if isinstance(command, Log):
        return f"Log {command.event}" + (f": {command.say}" if command.say else "")
    return line_of(command)


# ---------------------------------------------------------------------------------------------------------- telling

STORIES: dict[str, tuple[str, Callable[[], Story | ParkedAndBack]]] = {
    "one_step": ("Two members train one step; nothing disturbs them.", one_step),
    "kill_in_backward": ("One of three members is killed in the middle of a step.", kill_in_backward),
    "loss_during_recovery": ("One of four is lost, another one while the rest recovers.", loss_during_recovery),
    "join": ("Two members train; a third one joins at a step that all agree on.", join),
    "join_and_loss": ("A member is lost before the newcomer of the next view is let in.", join_and_loss),
    "parked_and_back": ("The agents of two nodes; without the store nobody may decide who goes on.", ParkedAndBack),
}
ABOUT_MEMBERS = """A line with an arrow is an event that a member's core (elastrain/member/) takes in: a message from
another member, something that its training loop did, or what came of an earlier command. The lines below it are the
commands that follow, in their order. What is named for the first time is explained by its docstring.

The job: four runs per step; two blocks with one shard each, every shard held by a primary and one backup.
"""
ABOUT_AGENTS = """A line with an arrow is an event that an agent's core (launcher/core/) takes in, with the seconds
since the start; events that nothing follows from are left out. The lines below it are the commands that follow. What is
named for the first time is explained by its docstring.
"""


def tell(name: str) -> str:
    """The transcript of one story."""
    title, make = STORIES[name]
    story = make()
    story.run()
    about = ABOUT_MEMBERS if isinstance(story, Story) else ABOUT_AGENTS
    return "\n".join([title, "", about, *story.teller.lines, "", *_ending(story)]) + "\n"


def _ending(story: Story | ParkedAndBack) -> Iterator[str]:
    if isinstance(story, Story):
        left = [name for name in story.members if name not in story.dead]
        digests = {story.members[name].digest() for name in left if story.members[name].committed >= 0}
        assert story.truth is not None
        is_equal = digests == {story.truth.digests[story.scenario.steps - 1]}
        yield f"# Ended {story.outcome}: the parameters are {'' if is_equal else 'not '}those of an undisturbed job."
    else:
        yield f"# The job {agents.outcome(story)}."


if __name__ == "__main__":
    sys.stdout.write(tell(sys.argv[1]))
