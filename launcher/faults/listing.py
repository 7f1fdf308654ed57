"""The table of fault classes as `elastrain inject --list` prints it, for people and for programs."""

from __future__ import annotations

import textwrap
from typing import Any

from elastrain.launcher.faults.fault import Scheme
from elastrain.launcher.faults.table import CLASSES, FaultClass, Lasting, Option
from elastrain.world import PHASES


def as_data() -> list[dict[str, Any]]:
    """The table for programs."""
    return [
        {
            "name": row.name,
            "by": str(row.by),
            "targets": [str(scheme) for scheme in row.targets],
            "phases": list(row.phases),
            "for": str(row.lasting),
            "for_s": row.for_s,
            "options": [_option_data(each) for each in row.options],
            "help": row.help,
        }
        for row in CLASSES.values()
    ]


def _option_data(option: Option) -> dict[str, Any]:
    bounds: dict[str, Any] = {"least": option.least, "most": option.most}
    words: dict[str, Any] = {"choices": list(option.choices)}
    is_word = isinstance(option.default, str)
    return {"name": option.name, "default": option.default, "help": option.help, **(words if is_word else bounds)}


def as_text() -> str:
    """The table for people: a class and its options below one another."""
    return "\n".join(_line(left, right) for row in CLASSES.values() for left, right in _columns(row))


_SHAPES = {
    Scheme.MEMBER: "member:ID, member:random",
    Scheme.NODE: "node:NAME, node:random",
    Scheme.LINK: "link:A-B",
    Scheme.ETCD: "etcd",
}
_LEFT, _WIDTH = 34, 118


def _columns(row: FaultClass) -> list[tuple[str, str]]:
    found = [
        (row.name, f"{row.help} (By the {row.by}.)"),
        ("  --target", ", ".join(_SHAPES[each] for each in row.targets)),
    ]
    if row.phases != PHASES:
        found.append(("  --at phase=", ", ".join(row.phases)))
    if row.lasting is not Lasting.NO:
        found.append(("  --for SECONDS", f"default: {'for ever' if row.for_s is None else f'{row.for_s:g}'}"))
    return found + [
        (f"  --{each.name} {_values(each)}", f"{each.help}; default: {each.default}") for each in row.options
    ]


def _values(option: Option) -> str:
    if isinstance(option.default, str):
        return "WORD" if len(option.choices) > 1 else "TEXT"
    return f"{option.least:g}..{option.most:g}"


def _line(left: str, right: str) -> str:
    return textwrap.fill(f"{left:<{_LEFT - 2}}  {right}", _WIDTH, subsequent_indent=" " * _LEFT, break_on_hyphens=False)
