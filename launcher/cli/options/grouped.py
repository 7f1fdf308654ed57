"""Commands with grouped options. A group is a frozen dataclass whose fields are options of the command line."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

from typer.core import TyperCommand

Group = TypeVar("Group")


def grouped(command: Callable[..., int]) -> Callable[..., int]:
    """Turn a command that takes groups as arguments into one whose options are the fields of these groups, in order.

    Groups may contain groups. typer reads the signature of the returned function.
    """
    hints = get_type_hints(command, include_extras=True)
    opened: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        opened += _options(kind) if is_dataclass(kind) else [parameter.replace(annotation=kind, kind=_KIND)]

    @wraps(command)
    def flat(**values: Any) -> int:
        made = {name: _make(hints[name], values) if is_dataclass(hints[name]) else values[name] for name in parameters}
        return command(**made)

    parameters = tuple(inspect.signature(command).parameters)
    flat.__signature__ = inspect.Signature(opened, return_annotation=int)  # type: ignore[attr-defined]  # read by inspect
    groups = [kind for kind in hints.values() if is_dataclass(kind)]
    flat.headings = {name: text for group in groups for name, text in _headings(group)}  # type: ignore[attr-defined]
    flat.__annotations__ = {"return": int, **{parameter.name: parameter.annotation for parameter in opened}}
    return flat


class HeadedCommand(TyperCommand):
    """A command whose help has the options of each group under the group's `heading`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options, in the order of their groups."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            heading = getattr(self.callback, "headings", {}).get(parameter.name, "Other")
            if (told := parameter.get_help_record(ctx)) is not None:
                is_option = parameter.param_type_name == "option"
                sections.setdefault(heading if is_option else "Arguments", []).append(told)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


_KIND = inspect.Parameter.KEYWORD_ONLY


def _options(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    found: list[inspect.Parameter] = []
    for field in fields(group):
        hint = hints[field.name]
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        one = inspect.Parameter(field.name, _KIND, default=default, annotation=hint)
        found += _options(hint) if is_dataclass(hint) else [one]
    return found


def _headings(group: Any) -> Iterator[tuple[str, str]]:
    """Yield each option of a group, and of the groups in it, with the `heading` of its group."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if is_dataclass(hints[field.name]):
            yield from _headings(hints[field.name])
        else:
            yield field.name, getattr(group, "heading", "Options")


def _make(group: Callable[..., Group], values: Mapping[str, Any]) -> Group:
    """Return the group, built from the values of its own fields."""
    hints = get_type_hints(group)
    made = {
        field.name: _make(hints[field.name], values) if is_dataclass(hints[field.name]) else values[field.name]
        for field in fields(group)  # type: ignore[arg-type]  # a dataclass
    }
    return group(**made)
