"""Finds what members would see differently of what blocks are handed beside tensors: caches, and what blocks change."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.kept import DEPTH, PLAIN, inside, keeps_fakes
from elastrain.pipeline.stubs.trees import leaves_of


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
            if not isinstance(leaf, (*PLAIN, Tensor)) and keeps_fakes(leaf):
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
        return [self._look(thing, DEPTH) for thing in self._given]

    def _look(self, thing: object, depth: int) -> object:
        """Another value where somebody has put something in or out since, or counted in it."""
        if isinstance(thing, PLAIN):
            return thing
        self._held.append(thing)
        inner = () if depth == 0 else inside(thing)
        names = map(str, thing) if isinstance(thing, dict) else ()
        return (id(thing), *names, *(self._look(each, depth - 1) for each in inner))
