"""Writes docs/machines.md, the pictures of the state machines, from the tables that the code itself follows.

`python -m docs.machines` writes the page; `tests/unit/test_docs.py` fails when it is out of date.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from elastrain.launcher.core import worker_table
from elastrain.member import loop_stages
from elastrain.offload.drives import residency

PAGE = Path(__file__).parent / "machines.md"
HEAD = """# Machines

State machines that are tables in the code. This page is generated from them: change the table, then run
`python -m docs.machines`.
"""


@dataclass(frozen=True, kw_only=True)
class Arrow:
    """One line of a table: in `state`, `event` leads to `after`, and `commands` are to be carried out."""

    state: str
    event: str
    after: str
    commands: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A table of the code, with what a reader has to know before it. `begin`: the states in which one is born."""

    title: str
    about: str
    begin: tuple[str, ...]
    arrows: tuple[Arrow, ...]


def machines() -> tuple[Machine, ...]:
    """All of the page, in its order."""
    return (
        Machine(
            title="A worker, as its agent sees it",
            about="`launcher/core/worker_table.py`: what a "
            "worker is decides what its end means. What is not drawn leaves "
            "the stage as it is.",
            begin=("starting",),
            arrows=_arrows(worker_table.TABLE),
        ),
        Machine(
            title="A saved storage",
            about="`offload/drives/residency.py`: where the"
            " bytes of one saved activation are. `Spill` and `Prefetch` are "
            "wishes of the policy, and change nothing where they are not drawn.",
            begin=("resident", "pinned"),
            arrows=_arrows(residency.TABLE),
        ),
        Machine(
            title="A member's training loop",
            about="`elastrain/member/loop_stages.py`: where the loop is. `Began`, `Ready` and `LoopEnded` come from "
            "it, the others are commands to it.",
            begin=("outside",),
            arrows=_arrows({pair: (after, ()) for pair, after in loop_stages.TABLE.items()}),
        ),
    )


def _arrows(table: Mapping[tuple[Any, Any], Any]) -> tuple[Arrow, ...]:
    """Of a table `(state, event) -> state` or `(state, event) -> (state, commands)`."""
    found = []
    for (state, event), value in table.items():
        after, commands = value if isinstance(value, tuple) else (value, ())
        named = tuple(_named(command) for command in commands)
        found.append(Arrow(state=_named(state), event=_named(event), after=_named(after), commands=named))
    return tuple(found)


def _named(value: Any) -> str:
    """A state, event or command for people: the text of an enumeration, or the name of a class."""
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name.lower().replace("_", " ")
    return value.__name__ if isinstance(value, type) else type(value).__name__


def _symbol(state: str) -> str:
    """Mermaid's identifiers have no blanks."""
    return state.replace(" ", "_")


def picture(machine: Machine) -> str:
    """A diagram that GitHub and the built pages draw. Events between the same two states share an arrow."""
    events: dict[tuple[str, str], list[str]] = {}
    for arrow in machine.arrows:
        events.setdefault((_symbol(arrow.state), _symbol(arrow.after)), []).append(arrow.event)
    states = dict.fromkeys(state for arrow in machine.arrows for state in (arrow.state, arrow.after))
    ends = states.keys() - {arrow.state for arrow in machine.arrows}
    lines = [f'state "{state}" as {_symbol(state)}' for state in states if " " in state]
    lines += [f"[*] --> {_symbol(state)}" for state in machine.begin]
    lines += [f"{state} --> {after}: {', '.join(names)}" for (state, after), names in events.items()]
    lines += [f"{_symbol(state)} --> [*]" for state in states if state in ends]
    return "\n".join(["```mermaid", "stateDiagram-v2", *(f"    {line}" for line in lines), "```"])


def table(machine: Machine) -> str:
    """The same with its commands, for machines that have some."""
    if not any(arrow.commands for arrow in machine.arrows):
        return ""
    lines = ["| state | event | next | commands |", "|---|---|---|---|"]
    lines += [f"| {a.state} | {a.event} | {a.after} | {', '.join(a.commands) or '–'} |" for a in machine.arrows]
    return "\n\n" + "\n".join(lines)


def page() -> str:
    """The whole text."""
    parts = [f"## {each.title}\n\n{each.about}\n\n{picture(each)}{table(each)}\n" for each in machines()]
    return HEAD + "\n" + "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
