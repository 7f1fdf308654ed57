"""Snapshots of what modules keep in attributes, so that runs on fakes leave no trace; and checks of the user's loop.

`KeptByModules` restores attributes. `KeptByLoop` notes real tensors into which the loop writes fakes. `BeforePass`
notes a model's numbers and hooks before a tracing pass. `Counters` checks models that count in their own attributes:
each member would count only the micro-batches that it computes.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.naming import is_fake

PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
DEPTH = 4
"""Levels of containers and objects that are searched: a cache keeps layers in a list, and these keep tensors in fields.
"""


class KeptByModules:
    """A snapshot of the attributes of a module and its submodules, with the dicts and lists in them."""

    def __init__(self, module: nn.Module) -> None:
        self._found: dict[int, tuple[Any, Any]] = {}
        self._classes = {its for each in module.modules() for its in type(each).__mro__}
        self._missed = {id(cache): cache.cache_info().misses for cache in _lru_caches(self._classes)}
        for each in module.modules():
            self._look(vars(each), DEPTH)
        held = (each for thing, _ in self._found.values() for each in inside(thing))
        self._copies: dict[int, Tensor] = {}
        self._versions = [(x, x._version) for x in held if isinstance(x, Tensor) and not x.is_inference()]

    @property
    def things(self) -> set[int]:
        """Ids of the attribute dicts of all modules, and of the dicts and lists in them."""
        return set(self._found)

    def changed(self) -> set[int]:
        """Return the ids of those whose content differs from the snapshot, or whose tensors were written into."""
        written = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        return {
            key
            for key, (now, was) in self._found.items()
            if list(map(_known, inside(now))) != list(map(_known, inside(was))) or written & set(map(id, inside(was)))
        }

    def copy_tensors(self) -> None:
        """Copy the tensors as they are now; `give_back` then restores these copies."""
        tensors = [x for _, was in self._found.values() for x in inside(was) if isinstance(x, Tensor)]
        self._copies = {id(x): x.detach().clone() for x in tensors if not isinstance(x, nn.Parameter)}

    def _look(self, thing: Any, depth: int) -> None:
        if type(thing) in _CONTAINERS and id(thing) not in self._found:
            self._found[id(thing)] = thing, thing.copy()
            for each in inside(thing) if depth else ():
                self._look(each, depth - 1)

    def numbers(self) -> list[list[object]]:
        """Return the present plain values in the attributes, dicts and lists."""
        return [[each for each in inside(thing) if isinstance(each, PLAIN)] for thing, _ in self._found.values()]

    def give_back(self) -> None:
        """Restore the snapshot, and clear each `functools.lru_cache` that holds fakes."""
        for thing, before in self._found.values():
            if isinstance(thing, list):
                thing[:] = [self._copies.get(id(each), each) for each in before]
            else:
                for name in thing.keys() - before.keys():
                    del thing[name]
                thing.update((name, self._copies.get(id(each), each)) for name, each in before.items())
        for cache in _lru_caches(self._classes):
            is_as_before = self._missed.get(id(cache)) == cache.cache_info().misses
            if not is_as_before and any(map(keeps_fakes, gc.get_referents(cache))):
                cache.cache_clear()


def _known(thing: object) -> object:
    return thing if isinstance(thing, PLAIN) else id(thing)


class KeptByLoop:
    """A record of the real tensors into which the loop writes fakes, each with the micro-batch of the first write."""

    def __init__(self) -> None:
        self._first = WeakIdKeyDictionary()

    def is_older(self, real: Tensor, passed: object) -> bool:
        """Return True if another micro-batch wrote into the tensor before."""
        base, now = real if real._base is None else real._base, weakref.ref(passed)
        return self._first.setdefault(base, now)() is not passed  # type: ignore[no-untyped-call]  # of torch


class BeforePass:
    """A snapshot of a model before a tracing pass: the numbers in its attributes, and the hooks of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._numbers = numbers_of(model)
        self._outside = set[tuple[str, int]]()
        self.handles = (
            model.register_forward_pre_hook(lambda *_: self._note(), prepend=True),
            model.register_forward_hook(lambda *_: setattr(self, "_known", self._hooks())),
        )
        self._known = self._hooks()

    def counted(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Return (before, after) of each number in module attributes that the forward has changed."""
        return changed(self._numbers, numbers_of(self._model))

    def check_hooks(self) -> None:
        """Raise ConfigError if the loop's body has left hooks.

        Hooks that the model's own forward registers are allowed.
        """
        self._note()
        for path, _ in sorted(self._outside & self._hooks()):
            raise ConfigError(
                f"the body of the loop registers a hook on {path or 'the model'!r}, and the tracing pass runs it once "
                "more: register hooks before the loop over job.steps(…)"
            )

    def _note(self) -> None:
        self._outside |= self._hooks() - self._known

    def _hooks(self) -> set[tuple[str, int]]:
        kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
        return {(at, its) for at, each in self._model.named_modules() for kind in kinds for its in getattr(each, kind)}


_LRU_CACHES: dict[int, tuple[object, int, list[Any]]] = {}
"""By id of a module or class: the object, its number of names when it was searched, and the caches found. There are
100,000 names in all, so an owner is searched again only when its number of names has changed.
"""


def _lru_caches(classes: Iterable[type]) -> Iterator[Any]:
    """Yield the `lru_cache` wrappers among the names of all imported Python modules and of these classes."""
    for owner in [*sys.modules.values(), *classes]:
        names, (_, count, caches) = getattr(owner, "__dict__", {}), _LRU_CACHES.get(id(owner), (None, -1, []))
        if len(names) != count:
            caches = [each for each in list(names.values()) if type(each) is functools._lru_cache_wrapper]
            _LRU_CACHES[id(owner)] = owner, len(names), caches
        yield from caches


def keeps_fakes(thing: object, depth: int = DEPTH) -> bool:
    """Return True if the thing is a fake, or holds one within `depth` levels."""
    return is_fake(thing) or (depth > 0 and any(keeps_fakes(each, depth - 1) for each in inside(thing)))


def inside(thing: object) -> Iterable[Any]:
    """Return what a container or an object holds; nothing for tensors, modules and functions."""
    if isinstance(thing, (*PLAIN, Tensor, nn.Module, ModuleType)) or callable(thing):
        return ()
    if isinstance(thing, dict):
        return list(thing.values())
    return list(thing) if isinstance(thing, list | tuple | set) else list(getattr(thing, "__dict__", {}).values())


Numbers = dict[tuple[str, str], float]
"""(path of a module, name of its attribute) -> value."""


def numbers_of(model: nn.Module) -> Numbers:
    """Return the numbers in attributes of all modules of the model."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


def changed(before: Numbers, after: Numbers) -> dict[tuple[str, str], tuple[float, float]]:
    """Return (before, after) of each number that differs. A number that was not there before counts as 0."""
    return {key: (before.get(key, 0), value) for key, value in after.items() if before.get(key, 0) != value}


class Counters:
    """A check, before each micro-batch, of the numbers that the tracing pass changed, as long as they keep changing."""

    def __init__(self, model: nn.Module, traced: Mapping[tuple[str, str], tuple[float, float]]) -> None:
        """Keep the model, and in `traced` the changes that the forward of the tracing pass made."""
        self._model = model
        self._traced = dict(traced)
        self._last: Numbers | None = None
        """The numbers before the last micro-batch that was checked."""
        self._is_next_as_traced = True
        """True before the first micro-batch: it repeats what the tracing pass did, and may be the only one."""

    def look(self) -> None:
        """Compare the numbers with those of the last look. Raises ConfigError if one changed as in the tracing pass."""
        if not self._traced or self._is_next_as_traced:
            self._is_next_as_traced = False
            return
        now = numbers_of(self._model)
        if self._last is not None:
            moves = changed(self._last, now)
            for key, move in moves.items():
                if key in self._traced and _is_same(self._traced[key], move):
                    name = ".".join(filter(None, key))
                    raise ConfigError(
                        f"the forward counts in {name!r} of the model, from {move[0]} to {move[1]} in one micro-batch, "
                        "and members compute different ones: let the loop set it by step.number, before its inner loop"
                    )
            self._traced = {key: move for key, move in moves.items() if key in self._traced}
        self._last = now


def _is_same(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return True if both changes add the same difference, or multiply by the same factor."""
    (a, b), (c, d) = one, other
    return math.isclose(b - a, d - c) or (a != 0 != c and math.isclose(b / a, d / c))
