"""Which submodules of a model are its blocks: by a rule, or by the user's patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from elastrain.errors import ConfigError

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def blocks_of(model: nn.Module, patterns: Sequence[str] | None = None) -> tuple[str, ...]:
    """Name the blocks in the model's order. `patterns`: names of submodules; `*` stands for one part of a name.

    Without patterns every child is opened that has, at any depth, a container with at least two children that own
    parameters; children of a container are blocks and are not opened. Raises ConfigError for patterns that fit nothing.
    """
    if patterns is None:
        return _distinct(model, _owners(model, ""))
    found = tuple(dict.fromkeys(name for pattern in patterns for name in _matching(model, pattern)))
    for name in found:
        inside = next((other for other in found if other.startswith(f"{name}.")), None)
        if inside is not None:
            raise ConfigError(f"block {inside!r} lies in block {name!r}: name one of them")
    return _distinct(model, found)


def _matching(model: nn.Module, pattern: str) -> list[str]:
    expression = re.compile(r"\.".join("[^.]+" if part == "*" else re.escape(part) for part in pattern.split(".")))
    named = (name for name, module in model.named_modules() if name and _owns(module))
    found = [name for name in named if expression.fullmatch(name)]
    if not found:
        raise ConfigError(f"no submodule that owns parameters is called {pattern!r}: see named_modules()")
    return found


def _owners(module: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _in_container(child, f"{prefix}{name}.")
        elif _owns(child):
            # A wrapper around a stack of layers would be one block of nearly the whole model.
            yield from _owners(child, f"{prefix}{name}.") if _has_stack(child) else (f"{prefix}{name}",)


def _in_container(container: nn.Module, prefix: str) -> Iterator[str]:
    for name, child in container.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _in_container(child, f"{prefix}{name}.")
        elif _owns(child):
            yield f"{prefix}{name}"


def _has_stack(module: nn.Module) -> bool:
    containers = (each for each in module.modules() if isinstance(each, _CONTAINERS))
    return any(sum(_owns(child) for child in container.children()) > 1 for container in containers)


def _owns(module: nn.Module) -> bool:
    """Whether there is something to fold in it: parameters, or running statistics."""
    if next(module.parameters(), None) is not None:
        return True
    return any(isinstance(each, _NormBase) and each.running_mean is not None for each in module.modules())


def _distinct(model: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Each module once: one that is registered twice is the block of its first name."""
    first: dict[int, str] = {}
    for name in names:
        first.setdefault(id(model.get_submodule(name)), name)
    return tuple(first.values())
