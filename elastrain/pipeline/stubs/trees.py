"""What blocks are given and return, as trees of leaves: those of `torch.utils._pytree`, with dataclasses as nodes, too.

The types of dataclasses themselves are not registered with torch: that is for the script to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, TypeGuard

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map, tree_unflatten


@dataclass(frozen=True)
class _Form:
    """A dataclass without its values."""

    kind: type
    names: tuple[str, ...]

    def made(self, values: Iterable[object]) -> object:
        """Not by its `__init__`, which may take other arguments or compute something."""
        thing: object = object.__new__(self.kind)
        for name, value in zip(self.names, values, strict=True):
            object.__setattr__(thing, name, value)
        return thing


class _Opened:
    """An instance of a dataclass as a node; it is one again where the tree is put together."""

    def __init__(self, thing: Any) -> None:
        # Slots of a class that it inherits from are among its fields only.
        names = dict.fromkeys((*getattr(thing, "__dict__", ()), *(each.name for each in fields(thing))))
        self.form = _Form(type(thing), tuple(name for name in names if hasattr(thing, name)))
        self.values = [_opened(getattr(thing, name)) for name in self.form.names]


register_pytree_node(_Opened, lambda opened: (opened.values, opened.form), lambda values, form: form.made(values))


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    leaves, spec = tree_flatten(tree)
    return tree_flatten(_opened(tree)) if any(map(_is_record, leaves)) else (leaves, spec)


def is_fake(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, FakeTensor)


def leaves_of(tree: Any) -> list[Any]:
    return flatten(tree)[0]


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of new containers, with `change` of each leaf."""
    leaves, spec = flatten(tree)
    return tree_unflatten(map(change, leaves), spec)


def _opened(tree: Any) -> Any:
    return tree_map(lambda leaf: _Opened(leaf) if _is_record(leaf) else leaf, tree)


def _is_record(leaf: object) -> bool:
    """A plain dataclass: others, such as a dict with fields or a module, cannot be taken apart like this."""
    kind = type(leaf)
    return hasattr(kind, "__dataclass_fields__") and kind.__new__ is object.__new__ and not isinstance(leaf, nn.Module)
