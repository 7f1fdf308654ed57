"""Bugs that are planted in the product's code: a part of a function's source is replaced in the worker that has them."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A bug, and a job in which it has to be found."""

    where: str
    """`module:function` or `module:Class.method`."""
    old: str
    new: str
    model: str = "gpt"
    members: int = 3
    stages: int = 1
    trouble: str = ""
    """What happens to a member besides; see `train._Troubles`."""


PLANTS: dict[str, Plant] = {}


def plant(name: str, folder: Path) -> None:
    """Put a bug into this process. Raises ValueError if the product's source has no such place."""
    if not name:
        return
    bug = PLANTS[name]
    module_name, _, path = bug.where.partition(":")
    module = importlib.import_module(module_name)
    found = module
    for part in path.split("."):
        found = inspect.getattr_static(found, part)
    function = inspect.unwrap(getattr(found, "fget", None) or getattr(found, "__func__", found))
    assert isinstance(function, FunctionType)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.where} has {source.count(bug.old)} places with {bug.old!r}; the plant {name!r} needs one")
    changed: dict[str, FunctionType] = {}
    definition = source[source.index("def ") :].replace(bug.old, bug.new)  # without decorators
    exec(f"from __future__ import annotations\n{definition}", vars(module), changed)
    function.__code__ = changed[function.__name__].__code__
    (folder / "planted").touch()
