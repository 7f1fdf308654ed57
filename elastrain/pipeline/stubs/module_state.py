"""What modules keep from one forward to the next, and runs on fakes give back; what the loop keeps, and may not."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.counters import changed, numbers_of
from elastrain.pipeline.stubs.naming import is_fake

PLAIN = (str, bytes, int, float, complex, bool, type(None))
_CONTAINERS = (dict, OrderedDict, defaultdict, list)
DEPTH = 4
"""A cache keeps its layers in a list, these their tensors in fields."""


class KeptByModules:
    """The attributes of a module and of all in it as they are now, with the dicts and lists in these."""

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
        """By id: the attributes of each module, and the dicts and lists in them."""
        return set(self._found)

    def changed(self) -> set[int]:
        """Those in which something else is by now, or whose tensors were written into."""
        written = {id(tensor) for tensor, version in self._versions if tensor._version != version}
        return {
            key
            for key, (now, was) in self._found.items()
            if list(map(_known, inside(now))) != list(map(_known, inside(was))) or written & set(map(id, inside(was)))
        }

    def copy_tensors(self) -> None:
        """From now on `give_back` puts copies of its tensors as they are now in their place."""
        tensors = [x for _, was in self._found.values() for x in inside(was) if isinstance(x, Tensor)]
        self._copies = {id(x): x.detach().clone() for x in tensors if not isinstance(x, nn.Parameter)}

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
    """Real tensors into which code behind all blocks writes fakes, and in which micro-batch it did so first."""

    def __init__(self) -> None:
        self._first = WeakIdKeyDictionary()

    def is_older(self, real: Tensor, passed: object) -> bool:
        """Whether another micro-batch wrote into it before."""
        base, now = real if real._base is None else real._base, weakref.ref(passed)
        return self._first.setdefault(base, now)() is not passed  # type: ignore[no-untyped-call]  # of torch


class BeforePass:
    """How a model was before a tracing pass: the numbers in its attributes, and the hooks of its modules."""

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
        """Numbers in attributes of modules that the forward has changed, from what to what."""
        return changed(self._numbers, numbers_of(self._model))

    def check_hooks(self) -> None:
        """Raises ConfigError where the body of the loop has left some; a model may hang up its own in its forward."""
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
"""Of who was looked through: how many names it had, and its caches. There are 100,000 names, and seldom new ones."""


def _lru_caches(classes: Iterable[type]) -> Iterator[Any]:
    """Those of functions of Python's modules, and of methods of classes."""
    for owner in [*sys.modules.values(), *classes]:
        names, (_, count, caches) = getattr(owner, "__dict__", {}), _LRU_CACHES.get(id(owner), (None, -1, []))
        if len(names) != count:
            caches = [each for each in list(names.values()) if type(each) is functools._lru_cache_wrapper]
            _LRU_CACHES[id(owner)] = owner, len(names), caches
        yield from caches


def keeps_fakes(thing: object, depth: int = DEPTH) -> bool:
    return is_fake(thing) or (depth > 0 and any(keeps_fakes(each, depth - 1) for each in inside(thing)))


def inside(thing: object) -> Iterable[Any]:
    """What a container or an object holds; nothing of tensors, modules and functions."""
    if isinstance(thing, (*PLAIN, Tensor, nn.Module, ModuleType)) or callable(thing):
        return ()
    if isinstance(thing, dict):
        return list(thing.values())
    return list(thing) if isinstance(thing, list | tuple | set) else list(getattr(thing, "__dict__", {}).values())
