"""Blocks that compute with what they have kept of an earlier micro-batch: members compute different ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

from elastrain.errors import ConfigError
from elastrain.pipeline.stubs.fakes import AbsentBlock, copy_of, left_as_it_was
from elastrain.pipeline.stubs.kept import KeptByModules
from elastrain.pipeline.stubs.trees import leaves_of, mapped


class Steady:
    """Of a block whose forward leaves something in its modules: whether its second micro-batch comes out the same
    where nothing is left of the first.
    """

    def __init__(self, block: AbsentBlock) -> None:
        self._name, self._module = block.name, block.module
        self._passed: object = None
        """The first micro-batch."""
        self._before: KeptByModules | None = None

    def has_seen(self, passed: object) -> bool:
        """Whether the block has been computed for another micro-batch; else this is the first one."""
        if self._before is None:
            self._passed, self._before = passed, KeptByModules(self._module)
            self._before.copy_tensors()
        return self._passed is not passed

    def check(self, forward: Callable[..., Any], arguments: Any, compute: Callable[[], Any]) -> Any:
        """`compute` the second one. Raises ConfigError where it comes out otherwise."""
        assert self._before is not None, "the first one was seen"
        unsaved = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        args, kwargs = mapped(_copied, arguments)  # blocks may begin in place
        with _disable_current_modes(), left_as_it_was(self._module, wholly=True), unsaved:
            self._before.give_back()
            for each in self._module.modules():
                if isinstance(each, _NormBase):  # the runtime counts what these measure
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
    """That is no leaf of autograd."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    return copy_of(leaf).requires_grad_(leaf.requires_grad).clone()


def _is_alike(one: object, other: object) -> bool:
    if not isinstance(one, Tensor) or one.layout is not torch.strided:
        return True
    return isinstance(other, Tensor) and one.shape == other.shape and bool(((one == other) | (one != one)).all())
