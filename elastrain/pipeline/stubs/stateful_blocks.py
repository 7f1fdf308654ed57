"""Checks of blocks with state that other members would not see.

`Steady` finds blocks that compute with what they kept from an earlier micro-batch: members compute different ones.
`Handed` finds arguments other than tensors that keep activations, such as caches, and arguments that a block changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.fakes import AbsentBlock, Unsaved, copy_of, left_as_it_was
from elastrain.pipeline.stubs.module_state import DEPTH, PLAIN, KeptByModules, inside, keeps_fakes
from elastrain.pipeline.stubs.naming import leaves_of, mapped


class Steady:
    """A check that a block gives the same output for its second micro-batch without the state that the first one left.

    It is made for blocks whose forward leaves something in their modules.
    """

    def __init__(self, block: AbsentBlock) -> None:
        self._name, self._module = block.name, block.module
        self._passed: object = None
        """The first micro-batch that the block computed."""
        self._before: KeptByModules | None = None

    def has_seen(self, passed: object) -> bool:
        """Return True if the block was computed for another micro-batch before. The first call takes a snapshot."""
        if self._before is None:
            self._passed, self._before = passed, KeptByModules(self._module)
            self._before.copy_tensors()
        return self._passed is not passed

    def check(self, forward: Callable[..., Any], arguments: Any, compute: Callable[[], Any]) -> Any:
        """Run `compute` for the second micro-batch and return its result.

        Raises ConfigError if a run of `forward` from the block's state before the first micro-batch gives another
        result.
        """
        assert self._before is not None, "the first one was seen"
        args, kwargs = mapped(_copied, arguments)  # blocks may change arguments in place
        with _disable_current_modes(), left_as_it_was(self._module, wholly=True), Unsaved():
            self._before.give_back()
            for each in self._module.modules():
                if isinstance(each, _NormBase):  # the runtime counts what these hooks measure
                    each._forward_pre_hooks.clear()
                    each._forward_hooks.clear()
            expected = leaves_of(forward(*args, **kwargs))
        returned = compute()
        if not all(map(_is_alike, leaves_of(returned), expected)):
            raise ConfigError(
                f"block {self._name!r} computes with what it has kept of an earlier micro-batch, in a buffer or an "
                "attribute, and members compute different ones: let it make what it returns of what it is given alone"
            )
        return returned


def _copied(leaf: object) -> object:
    """Return a copy of a tensor that is no leaf of autograd; other values as they are."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    return copy_of(leaf).requires_grad_(leaf.requires_grad).clone()


def _is_alike(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    return isinstance(other, Tensor) and one.shape == other.shape and bool(((one == other) | (one != one)).all())


class Handed:
    """The arguments of a block in the tracing pass, compared before and after it runs."""

    def __init__(self, block: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._block = block
        self._given = [*args, *kwargs.values()]
        self._held: list[object] = []  # or another object could get the address of one that is gone
        self._before = self._looked_at()

    def check(self, returned: object = None) -> None:
        """Check the arguments after the block has run, completely or up to an error.

        Raises ConfigError if an argument or result other than a tensor keeps activations, or if an argument was
        changed.
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
        """Return a fingerprint of the thing. It changes when an item is added, removed or counted."""
        if isinstance(thing, PLAIN):
            return thing
        self._held.append(thing)
        inner = () if depth == 0 else inside(thing)
        names = map(str, thing) if isinstance(thing, dict) else ()
        return (id(thing), *names, *(self._look(each, depth - 1) for each in inner))
