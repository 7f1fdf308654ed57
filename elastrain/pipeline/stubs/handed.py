"""Finds what members would see differently of what blocks are handed beside tensors: caches, and what blocks change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.fakes import is_fake
from elastrain.pipeline.stubs.trees import leaves_of

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_DEPTH = 4
"""A cache keeps its layers in a list, these their tensors in fields."""


class Handed:
    """What a block is given in the tracing pass, looked at before it runs and again behind it."""

    def __init__(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._given = [*args, *kwargs.values()]
        self._held: list[object] = []  # or another object could come to lie where one was
        self._before = self._looked_at()

    def check(self, returned: object = None) -> None:
        """The block has run, as far as it came.

        Raises ConfigError where something that is no tensor keeps activations, or what the block was given has changed.
        """
        for leaf in (*leaves_of(self._given), *leaves_of(returned)):
            if not isinstance(leaf, (*_PLAIN, Tensor)) and _keeps_fakes(leaf, _DEPTH):
                raise ConfigError(
                    f"block {self._block!r} is handed a cache ({type(leaf).__name__}) that keeps its activations for "
                    "later blocks, which another member may compute: switch such caches off (use_cache=False), or hand "
                    "tensors over, in tuples, dicts or dataclasses"
                )
        for thing, before, after in zip(self._given, self._before, self._looked_at(), strict=True):
            if before != after:
                raise ConfigError(
                    f"block {self._block!r} changes the {type(thing).__name__} that it is given, which members that "
                    "compute other blocks would not see: let it return what is new"
                )

    def _looked_at(self) -> list[object]:
        return [self._look(thing, _DEPTH) for thing in self._given]

    def _look(self, thing: object, depth: int) -> object:
        """Another value where somebody has put something in or out since, or counted in it."""
        if isinstance(thing, _PLAIN):
            return thing
        self._held.append(thing)
        inner = () if depth == 0 else _inside(thing)
        names = map(str, thing) if isinstance(thing, dict) else ()
        return (id(thing), *names, *(self._look(each, depth - 1) for each in inner))


def _keeps_fakes(thing: object, depth: int) -> bool:
    if isinstance(thing, Tensor):
        return is_fake(thing)
    return depth > 0 and any(_keeps_fakes(each, depth - 1) for each in _inside(thing))


def _inside(thing: object) -> Iterable[object]:
    """What a container or an object holds; nothing of tensors, modules and functions."""
    if isinstance(thing, (*_PLAIN, Tensor, nn.Module)) or callable(thing):
        return ()
    if isinstance(thing, dict):
        return list(thing.values())
    return list(thing) if isinstance(thing, list | tuple | set) else list(getattr(thing, "__dict__", {}).values())
