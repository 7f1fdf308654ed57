"""Writes docs/machines.md, the pictures of the state machines, from the tables that the code itself follows.

`python -m docs.machines` writes the page; `tests/unit/test_docs.py` fails when it is out of date.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastrain.offload import residency

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
            title="A saved storage",
            about="`offload/residency.py`: where the bytes of one saved activation are. `Spill` and `Prefetch` are "
            "wishes of the policy, and change nothing where they are not drawn.",
            begin=("resident", "pinned"),
            arrows=_arrows(residency.TABLE),
        ),
    )


def _arrows(table: Mapping[tuple[Any, Any], tuple[Any, Iterable[Any]]]) -> tuple[Arrow, ...]:
    """Of a table `(state, event) -> (state, commands)`, whose values are enumerations, classes or plain text."""
    return tuple(
        Arrow(state=_named(state), event=_named(event), after=_named(after), commands=tuple(map(_named, commands)))
        for (state, event), (after, commands) in table.items()
    )


def _named(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    return str(getattr(value, "value", None) or (value if isinstance(value, str) else type(value).__name__))


def picture(machine: Machine) -> str:
    """A diagram that GitHub and the built pages draw. Events between the same two states share an arrow."""
    lines = ["```mermaid", "stateDiagram-v2", *(f"    [*] --> {state}" for state in machine.begin)]
    events: dict[tuple[str, str], list[str]] = {}
    for arrow in machine.arrows:
        events.setdefault((arrow.state, arrow.after), []).append(arrow.event)
    lines += [f"    {state} --> {after}: {', '.join(names)}" for (state, after), names in events.items()]
    leaving = {arrow.state for arrow in machine.arrows}
    ends = dict.fromkeys(arrow.after for arrow in machine.arrows if arrow.after not in leaving)
    return "\n".join([*lines, *(f"    {state} --> [*]" for state in ends), "```"])


def table(machine: Machine) -> str:
    """The same with its commands."""
    lines = ["| state | event | next | commands |", "|---|---|---|---|"]
    lines += [f"| {a.state} | {a.event} | {a.after} | {', '.join(a.commands) or '–'} |" for a in machine.arrows]
    return "\n".join(lines)


def page() -> str:
    """The whole text."""
    parts = [f"## {each.title}\n\n{each.about}\n\n{picture(each)}\n\n{table(each)}\n" for each in machines()]
    return HEAD + "\n" + "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
