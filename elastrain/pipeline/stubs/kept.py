"""What modules keep from one forward to the next: a run on fakes gives it back."""

from __future__ import annotations

import functools
import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from elastrain.pipeline.stubs.trees import is_fake

PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
DEPTH = 4
"""A cache keeps its layers in a list, these their tensors in fields."""


class KeptByModules:
    """The attributes of a module and of all in it as they are now, with the dicts and lists in these."""

    def __init__(self, module: nn.Module) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}
        self._classes = {its for each in module.modules() for its in type(each).__mro__}
        for each in module.modules():
            self._look(vars(each), DEPTH)

    def _look(self, thing: Any, depth: int) -> None:
        if type(thing) in _CONTAINERS and id(thing) not in self._found:
            self._found[id(thing)] = thing, thing.copy()
            for each in inside(thing) if depth else ():
                self._look(each, depth - 1)

    def numbers(self) -> list[list[object]]:
        """The plain values in them, as they are by now."""
        return [[each for each in inside(thing) if isinstance(each, PLAIN)] for thing, _ in self._found.values()]

    def give_back(self) -> None:
        """Everything, and have `functools.lru_cache` forget fakes."""
        for thing, before in self._found.values():
            if isinstance(thing, list):
                thing[:] = before
            else:
                for name in thing.keys() - before.keys():
                    del thing[name]
                thing.update(before)
        for cache in _lru_caches([*sys.modules.values(), *self._classes]):
            if any(map(keeps_fakes, gc.get_referents(cache))):
                cache.cache_clear()


def _lru_caches(owners: Iterable[object]) -> list[Any]:
    """Those of functions of Python's modules, and of methods of classes."""
    named = (each for owner in owners for each in list(getattr(owner, "__dict__", {}).values()))
    return [each for each in named if type(each) is functools._lru_cache_wrapper]


def keeps_fakes(thing: object, depth: int = DEPTH) -> bool:
    return is_fake(thing) or (depth > 0 and any(keeps_fakes(each, depth - 1) for each in inside(thing)))


def inside(thing: object) -> Iterable[Any]:
    """What a container or an object holds; nothing of tensors, modules and functions."""
    if isinstance(thing, (*PLAIN, Tensor, nn.Module, ModuleType)) or callable(thing):
        return ()
    if isinstance(thing, dict):
        return list(thing.values())
    return list(thing) if isinstance(thing, list | tuple | set) else list(getattr(thing, "__dict__", {}).values())
