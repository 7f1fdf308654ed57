"""Shows the arguments in our docstrings as a table: lines `name: what it is`, which stand without a heading there."""

from __future__ import annotations

from typing import Any

import griffe


class Arguments(griffe.Extension):
    """Gives such lines the heading and the indentation by which griffe knows arguments."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Called for each function of the sources."""
        if func.docstring is not None:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = with_heading(func.docstring.value, names)


def with_heading(text: str, names: set[str]) -> str:
    """The docstring with its first paragraph of arguments as a section."""
    parts = text.split("\n\n")
    for number, part in enumerate(parts):
        if part.partition(":")[0] in names:
            parts[number] = "Args:\n" + "\n".join(f"    {line}" for line in part.split("\n"))
            break
    return "\n\n".join(parts)
