"""Finds objects that are handed from block to block and keep activations: a cache is on one member only."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.fakes import is_fake

_PLAIN = (str, bytes, int, float, complex, bool, type(None))
_DEPTH = 4
"""A cache keeps its layers in a list, these their tensors in fields."""


def check_handed(block: str, leaves: Iterable[object]) -> None:
    """Raises ConfigError where an argument or a result of the block that is no tensor keeps activations."""
    for leaf in leaves:
        if not isinstance(leaf, (*_PLAIN, Tensor)) and _keeps_fakes(leaf, _DEPTH):
            raise ConfigError(
                f"block {block!r} is handed a cache ({type(leaf).__name__}) that keeps its activations for later "
                "blocks, which another member may compute: switch such caches off (use_cache=False), or hand tensors "
                "over"
            )


def _keeps_fakes(thing: object, depth: int) -> bool:
    if isinstance(thing, Tensor):
        return is_fake(thing)
    if isinstance(thing, _PLAIN) or callable(thing) or depth == 0:
        return False
    if isinstance(thing, dict):
        inner: Iterable[object] = thing.values()
    elif isinstance(thing, list | tuple | set):
        inner = thing
    else:
        inner = getattr(thing, "__dict__", {}).values()
    return any(_keeps_fakes(each, depth - 1) for each in list(inner))
