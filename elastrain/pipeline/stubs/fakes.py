"""Fakes: tensors with shape, strides and dtype and without memory, and what follows when code reads a value of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from elastrain.errors import ConfigError
from elastrain.pipeline.graph import CrossingTensor

_NO_NAMES: Mapping[str, object] = {}
_PLAIN_TENSORS = (Tensor, nn.Parameter)


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves `__init_subclass__` untyped
    """torch's mode, with our sentence where code reads what a fake does not have."""

    def __init__(self) -> None:
        # Parameters, masks and the batch are real in the user's code, and meet fakes there.
        super().__init__(allow_non_fake_inputs=True)
        self.stands_for_parameter: Callable[[Tensor], None] | None = None
        """Told of each fake that was made for a parameter, which is anew in each operation."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] = _NO_NAMES
    ) -> Any:
        # Of an operation on a real tensor torch works the result out anew each time, which takes milliseconds.
        if isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:
            args = [self._like(each) if type(each) in _PLAIN_TENSORS else each for each in args]
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise ConfigError(
                f"{func} looks at values that are not on this member, because another one computes the block that "
                "makes them: move it into a block, or read step.loss once the step is committed"
            ) from None

    def _like(self, real: Any) -> Tensor:
        """A fake for a real tensor that meets fakes. What is unusual stays as it is: torch knows how to treat it."""
        if real.dim() == 0 or real.layout is not torch.strided or real.is_quantized or real.is_conj() or real.is_neg():
            return real  # type: ignore[no-any-return]  # a tensor: it is asked for everything first
        meta = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        like = FakeTensor(self, meta, real.device)
        if self.stands_for_parameter is not None and isinstance(real, nn.Parameter):
            self.stands_for_parameter(like)
        return like


class _Output(torch.autograd.Function):
    """A tensor that is no leaf: code behind a block may change it in place, as it may a real output."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, shape: CrossingTensor) -> Tensor:
        return torch.empty_strided(shape.shape, shape.stride, dtype=getattr(torch, shape.dtype), device=leaf.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, None


def shape_of(tensor: Tensor) -> CrossingTensor:
    return CrossingTensor(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.dtype.itemsize,
        requires_grad=tensor.requires_grad,
    )


@dataclass(frozen=True)
class BlockOutputs:
    """What a block returns: the tree of it, with shapes in place of tensors."""

    leaves: tuple[object, ...]
    tree: TreeSpec
    device: torch.device

    @staticmethod
    def of(returned: object, device: torch.device) -> BlockOutputs:
        leaves, tree = tree_flatten(returned)
        return BlockOutputs(tuple(shape_of(x) if isinstance(x, Tensor) else x for x in leaves), tree, device)

    def fakes(self, mode: FakeTensorMode) -> object:
        """Fresh fakes in the block's own tree."""
        made = [self._fake(mode, leaf) if isinstance(leaf, CrossingTensor) else leaf for leaf in self.leaves]
        return tree_unflatten(made, self.tree)

    def _fake(self, mode: FakeTensorMode, shape: CrossingTensor) -> Tensor:
        with mode:
            if not shape.requires_grad:
                dtype = getattr(torch, shape.dtype)
                return torch.empty_strided(shape.shape, shape.stride, dtype=dtype, device=self.device)
            leaf = torch.empty((), device=self.device, requires_grad=True)
            made: Tensor = _Output.apply(leaf, shape)  # type: ignore[no-untyped-call]  # of torch
            return made


class FakesOfBlock:
    """The fakes of one absent block, made once and returned for each micro-batch."""

    def __init__(self, outputs: BlockOutputs) -> None:
        self._outputs = outputs
        self._made: object = None
        self._versions: tuple[int, ...] | None = None

    def take(self, mode: FakeTensorMode, *, fresh: bool) -> object:
        """`fresh`: others may keep them beyond this micro-batch, so that they have to be objects of their own."""
        if fresh:
            return self._outputs.fakes(mode)
        # Whoever changed one in place has put its own operations behind it: they must not pile up.
        if self._versions is None or self._versions != _versions(self._made):
            self._made = self._outputs.fakes(mode)
            self._versions = _versions(self._made)
        return self._made


def _versions(tree: object) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor))


def is_fake(leaf: object) -> bool:
    return isinstance(leaf, FakeTensor)


def copy_of(tensor: Tensor) -> Tensor:
    """A copy with the same strides, also where elements overlap or leave gaps: kernels choose by strides."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    detached = tensor.detach()
    # The copy is a tensor of its own and no view: autograd lets nobody change a view of a function's result in place.
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copied.as_strided((span,), (1,)).copy_(detached.as_strided((span,), (1,), detached.storage_offset()))
    return copied


def device_of(parameters: Callable[[], Any]) -> torch.device:
    first = next(parameters(), None)
    return torch.device("cpu") if first is None else first.device
