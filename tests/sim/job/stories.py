"""Short jobs of several nodes with one fault or two, told event by event: more of tests/sim/transcripts.

What is told: each event of an agent's core from which something follows, with the commands that follow; and of members
the few commands that say how far they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastrain import protocol as p
from elastrain.launcher.shared.job_values import Command
from tests.sim.job import schedule as sc
from tests.sim.job.agent import AgentProcess
from tests.sim.job.world import World, outcome
from tests.sim.stories import Teller, _agent_line, line_of

_TOLD = (p.EditMesh, p.Resumed, p.Passed, p.Fail, p.Leave)
ABOUT = """A line with an arrow is an event that the core of an agent (launcher/core/) takes in, with the seconds since
the start; the lines below it are the commands that follow. Lines with a colon are commands of a member's core
(elastrain/member/). Events that nothing follows from are left out, and so is what came before the first fault. What
is named for the first time is explained by its docstring.
"""


class JobStory(World):
    """Tells what its cores do, from the first fault on."""

    def __init__(self, schedule: sc.Schedule) -> None:
        self.teller = Teller()
        self._who = ""
        super().__init__(schedule)

    def say(self, line: str) -> None:
        if line.startswith("FAULT") and "(" in line:
            self.teller.note(f"{self.clock.now:.1f} s. {_in_words(line)}")
            self.teller.is_telling = True

    def made(self, agent: AgentProcess) -> None:
        core: Any = agent.core
        handle, on_tick = core.handle, core.on_tick

        def heard(event: Any, now: float) -> list[Command]:
            commands: list[Command] = handle(event, now)
            if commands:
                self.teller.say("", f"{now:7.3f}  {agent.name} <- {line_of(event)}", event)
            return self._told(commands)

        def ticked(now: float) -> list[Command]:
            commands: list[Command] = on_tick(now)
            if commands:
                self.teller.say("", f"{now:7.3f}  {agent.name} has waited long enough")
            return self._told(commands)

        core.handle, core.on_tick = heard, ticked

    def _told(self, commands: list[Command]) -> list[Command]:
        for command in commands:
            self.teller.say("          ", _agent_line(command), command)
        return commands

    def tell_event(self, member: str, event: p.Event) -> None:
        self._who = member

    def tell_command(self, command: p.Command) -> None:
        if isinstance(command, _TOLD):
            self.teller.say("", f"{self.clock.now:7.3f}  {self._who}: {line_of(command)}", command)


def _in_words(line: str) -> str:
    name = line.removeprefix("FAULT ").split("(")[0]
    kind: type = getattr(sc, name)
    return f"{line.removeprefix('FAULT ')}. {(kind.__doc__ or '').splitlines()[0]}"


def _three(*faults: sc.AnyFault, **sizes: Any) -> Callable[[], sc.Schedule]:
    given = {"nodes": 3, "steps": 3, "runs": 3, "one_host": False, **sizes}
    return lambda: sc.Schedule(seed=3, faults=faults, **given)


STORIES: dict[str, tuple[str, Callable[[], sc.Schedule]]] = {
    "last_holder_lost": (
        "Both holders of a shard die at once: the state is gone, and the job ends with a sentence on every node.",
        _three(sc.KillHolders(at_s=2.0, shard=0, spared=0)),
    ),
    "node_cut_off": (
        "One of three nodes reaches nobody for nine seconds: two go on, one parks, is told, and comes in again.",
        _three(sc.Isolate(at_s=2.0, node=2, for_s=9.0), steps=6),
    ),
    "node_that_slept": (
        "A node stands still until the job is over. It must not go on alone from what it remembers.",
        _three(sc.Pause(at_s=1.5, who=2, for_s=13.0, is_node=True), steps=2),
    ),
    "store_without_its_data": (
        "etcd comes back empty, and then a worker dies. What stood is put again before a view may change.",
        _three(sc.Wipe(at_s=2.0, for_s=1.0), sc.Kill(at_s=3.5, who=1), nodes=2, steps=8),
    ),
}


def tell(name: str) -> str:
    """The transcript of one story."""
    title, make = STORIES[name]
    story = JobStory(make())
    story.run()
    return "\n".join([title, "", ABOUT, *story.teller.lines, "", f"# The job has {_ending(story)}."]) + "\n"


def _ending(story: JobStory) -> str:
    ends: Sequence[Any] = [agent.core.shutdown.end for agent in story.agents.values()]
    said = "; ".join(f"{name}: {end.code}" for name, end in zip(story.agents, ends, strict=True) if end is not None)
    return f"{outcome(story)} ({said})"
