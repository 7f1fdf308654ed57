"""Fakes (tensors with shape, strides and dtype but no memory), results of absent blocks, refusals of value reads."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_unflatten

from elastrain.errors import ConfigError
from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.stubs.generators import device_of, left_as_they_were
from elastrain.pipeline.stubs.module_state import KeptByModules
from elastrain.pipeline.stubs.naming import flatten, is_fake, leaves_of, mapped
from elastrain.pipeline.stubs.placeholders import AbsentParameter

NOT_HERE = (
    "values that are not on this member, because another one computes the block that makes them: move it into a block, "
    "or read step.loss once the step is committed"
)
_NO_NAMES: Mapping[str, object] = {}
_PLAIN_TENSORS = (Tensor, nn.Parameter, AbsentParameter)
_MOST = 256  # Maximum number of remembered argument keys of an absent block; text lengths, say, may give many.
Given = tuple[object, ...]
"""The key of a block's arguments: names, then for each argument a tensor's shape and dtype, an integer or text, or
None.
"""


class Unsaved(torch.autograd.graph.saved_tensors_hooks):
    """Hooks that keep saved tensors as they are, and hide them from the hooks of a checkpoint."""

    def __init__(self) -> None:
        super().__init__(lambda tensor: tensor, lambda tensor: tensor)


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]  # torch leaves `__init_subclass__` untyped
    """torch's fake mode with a ConfigError of ours where code reads a value that a fake does not have."""

    def __init__(self) -> None:
        # Parameters, masks and the batch are real in the user's code, and meet fakes there.
        super().__init__(allow_non_fake_inputs=True)
        self.stands_for_parameter: Callable[[Tensor], None] | None = None
        """A callback for each fake that is made for a parameter. Each operation makes a new one."""
        self.written: Callable[[Any, Tensor], None] = lambda func, real: None
        """A callback for each real tensor into which code between blocks writes fakes."""
        self._is_in_block = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[object] = (), kwargs: Mapping[str, object] = _NO_NAMES
    ) -> Any:
        # torch would convert a real tensor anew in each operation, which takes milliseconds.
        if isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable:
            args = [self._like(each) if type(each) in _PLAIN_TENSORS else each for each in args]
        elif isinstance(func, torch._ops.OpOverload) and not self._is_in_block:
            given = dict(zip([each.name for each in func._schema.arguments], args, strict=False)) | dict(kwargs)
            changed = [given.get(each.name) for each in func._schema.arguments if each.is_write]
            for real in (leaf for leaf in leaves_of(changed) if type(leaf) in _PLAIN_TENSORS):
                self.written(func, real)
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            raise ConfigError(f"{func} looks at {NOT_HERE}") from None

    def __deepcopy__(self, memo: dict[int, object]) -> Fakes:
        """Return the same mode, so that copies of fakes belong to it."""
        return self

    @contextlib.contextmanager
    def block(self) -> Iterator[None]:
        """Enter the mode for a block that runs on fakes.

        What the block writes into is its own, so `written` is not called.
        """
        self._is_in_block = True
        try:
            with self:
                yield
        finally:
            self._is_in_block = False

    def _like(self, real: Any) -> Tensor:
        """Return a fake for a real tensor that meets fakes.

        Unusual tensors are returned as they are: torch can handle them.
        """
        if real.dim() == 0 or real.layout is not torch.strided or real.is_quantized or real.is_conj() or real.is_neg():
            return real  # type: ignore[no-any-return]  # a tensor: callers pass tensors only
        is_absent = 0 in real.stride() and isinstance(real, nn.Parameter)
        # On a member that has the parameter it is contiguous, as in a flat.
        stride = torch.empty(real.shape, device="meta").stride() if is_absent else real.stride()
        meta = torch.empty_strided(real.shape, stride, dtype=real.dtype, device="meta")
        like = FakeTensor(self, meta, real.device)
        if self.stands_for_parameter is not None and isinstance(real, nn.Parameter):
            self.stands_for_parameter(like)
        return like


def _refusing(name: str) -> Callable[..., Any]:
    own = getattr(FakeTensor, name)

    def refuse(self: FakeTensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.fake_mode, Fakes) and args != ("",):  # `print` and an f-string show the fake
            raise ConfigError(f"Tensor.{name} looks at {NOT_HERE}")
        return own(self, *args, **kwargs)

    return refuse


# torch raises its own errors for all fakes in these methods.
for _name in ("numpy", "__array__", "__format__", "__reduce_ex__"):
    setattr(FakeTensor, _name, _refusing(_name))


class _Output(torch.autograd.Function):
    """An autograd function whose result is no leaf: code behind a block may change it in place, as a real output."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, shape: CrossingTensor) -> Tensor:
        """Return a tensor of this shape."""
        return torch.empty_strided(shape.shape, shape.stride, dtype=getattr(torch, shape.dtype), device=leaf.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return no gradients."""
        return None, None


def shape_of(tensor: Tensor) -> CrossingTensor:
    """Return the description of a tensor."""
    return CrossingTensor(
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.dtype.itemsize,
        requires_grad=tensor.requires_grad,
    )


@dataclass(frozen=True)
class BlockOutputs:
    """The result of a block: its tree, with descriptions in place of tensors."""

    leaves: tuple[object, ...]
    tree: TreeSpec
    devices: tuple[torch.device | None, ...]
    """The device of each leaf that is a tensor."""

    @staticmethod
    def of(returned: object) -> BlockOutputs:
        """Return the description of a block's result."""
        leaves, tree = flatten(returned)
        made = tuple(shape_of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        devices = tuple(leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves)
        return BlockOutputs(made, tree, devices)

    def fakes(self, mode: FakeTensorMode) -> object:
        """Return new fakes in the block's own tree."""
        its = zip(self.leaves, self.devices, strict=True)
        with mode:
            made = [fake(leaf, device) if isinstance(leaf, CrossingTensor) else leaf for leaf, device in its]
        return tree_unflatten(made, self.tree)


def fake(shape: CrossingTensor, device: torch.device | None) -> Tensor:
    """Return a new fake that is no leaf. Must be called under a fake mode."""
    if not shape.requires_grad:
        return torch.empty_strided(shape.shape, shape.stride, dtype=getattr(torch, shape.dtype), device=device)
    return _Output.apply(torch.empty((), device=device, requires_grad=True), shape)  # type: ignore[no-untyped-call,no-any-return]  # of torch


class FakesOfBlock:
    """The fakes of one absent block, made once and returned for each micro-batch."""

    def __init__(self, outputs: BlockOutputs) -> None:
        self._outputs = outputs
        self._made: object = None
        self._versions: tuple[int, ...] | None = None

    def take(self, mode: FakeTensorMode, *, fresh: bool) -> object:
        """Return the fakes. With `fresh` they are new objects, because code may keep them beyond this micro-batch."""
        if fresh:
            return self._outputs.fakes(mode)
        # A fake that was changed in place has the user's operations in its graph. They must not pile up, so it is
        # replaced.
        if self._versions is None or self._versions != _versions(self._made):
            self._made = self._outputs.fakes(mode)
            self._versions = _versions(self._made)
        return self._made


class AbsentBlock:
    """The results of one absent block by its arguments: seen in the tracing pass, or found by a run on fakes."""

    def __init__(self, name: str, module: nn.Module, traced: Mapping[Given, BlockOutputs], mode: Fakes) -> None:
        self.name, self.module, self._mode = name, module, mode
        self._traced = {key: FakesOfBlock(outputs) for key, outputs in traced.items()}
        self._found: dict[Given, FakesOfBlock] = {}

    def take(self, forward: Callable[..., Any], args: Any, kwargs: Any, *, leaves: list[object], fresh: bool) -> object:
        """Return the fakes for these arguments, whose leaves are `leaves`.

        Raises ConfigError for shapes that the tracing pass did not see, if the block cannot run on fakes.
        """
        key = given(leaves, kwargs)
        known = self._traced.get(key) or self._found.get(key)
        if known is None:
            known = self._found[key] = self._find(key, forward, (args, kwargs))
            if len(self._found) > _MOST:
                del self._found[next(iter(self._found))]
        return known.take(self._mode, fresh=fresh)

    def _find(self, key: Given, forward: Callable[..., Any], arguments: Any) -> FakesOfBlock:
        try:
            return FakesOfBlock(self._run(forward, arguments))
        except Exception as error:
            # Different numbers alone are assumed not to change the result.
            new, *seen = [str([tuple(x[0]) for x in each if isinstance(x, tuple)]) for each in (key, *self._traced)]
            if new in seen:
                return tuple(self._traced.values())[seen.index(new)]
            what = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ConfigError(
                f"block {self.name!r} is given {new}, and in the tracing pass it was given "
                f"{' or '.join(seen) or 'nothing'}; "
                f"without values it cannot be known what it returns for that ({what}): give all micro-batches the same "
                "shapes (pad them to one length, leave none smaller)"
            ) from error

    def _run(self, forward: Callable[..., Any], arguments: Any) -> BlockOutputs:
        # Checkpoints count saved tensors, and selective ones keep results of operations. They must see nothing of this
        # run.
        with _disable_current_modes(), left_as_it_was(self.module, wholly=True), Unsaved(), self._mode.block():
            args, kwargs = mapped(_fresh, arguments)
            return BlockOutputs.of(forward(*args, **kwargs))


def given(leaves: Sequence[object], kwargs: Mapping[str, object]) -> Given:
    """Return the key of a block's arguments. `leaves` are the leaves of all arguments."""
    return (*kwargs, *map(_given, leaves))


def _given(leaf: object) -> object:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.requires_grad) if leaf.layout is torch.strided else None
    return leaf if isinstance(leaf, int | str) else None


def _fresh(leaf: object) -> object:
    """Return a copy that a block may change in place. A real scalar keeps its value, as in the tracing pass."""
    if not isinstance(leaf, Tensor):
        return leaf
    return fake(shape_of(leaf), leaf.device) if leaf.dim() or is_fake(leaf) else leaf.clone()


def _versions(tree: object) -> tuple[int, ...]:
    return tuple(leaf._version for leaf in leaves_of(tree) if isinstance(leaf, Tensor))


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy with the same strides, even if elements overlap or leave gaps: kernels choose by strides."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in sizes) if tensor.numel() else 0
    detached = tensor.detach()
    # The copy is no view: autograd forbids in-place changes of a view that a function returns.
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    copied.as_strided((span,), (1,)).copy_(detached.as_strided((span,), (1,), detached.storage_offset()))
    return copied


@contextlib.contextmanager
def left_as_it_was(
    module: nn.Module, *, wholly: bool = False, is_eager: bool = True
) -> Iterator[Callable[[], list[Tensor]]]:
    """Run the body, then restore torch's generators and the module's buffers. `wholly`: restore everything else, too.

    Yields a function that returns the buffers that the body has changed. `is_eager`: compiled code runs eagerly.
    """
    kept = KeptByModules(module) if wholly else None
    buffers = [(each, each._buffers) for each in module.modules()]
    for each, its in buffers:
        each._buffers = {name: None if value is None else value.clone() for name, value in its.items()}
    pairs = [(each, name, value, each._buffers[name]) for each, its in buffers for name, value in its.items()]
    # The cache would hand weights that were cast as fakes to later code.
    is_cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    python, numpys, log = random.getstate(), np.random.get_state(), logging.getLogger("torch._subclasses.fake_tensor")
    # The logger prints tracebacks for missing fake kernels.
    is_off, log.disabled = log.disabled, True
    try:
        with left_as_they_were(device_of(module)), not_compiled() if is_eager else contextlib.nullcontext():
            yield lambda: [
                value
                for each, name, value, copy in pairs
                if value is not None and copy is not None and (each._buffers.get(name) is not copy or copy._version)
            ]
    finally:
        log.disabled = is_off
        torch.set_autocast_cache_enabled(is_cached)
        for each, its in buffers:
            each._buffers = its
        if kept is not None:
            kept.give_back()
            random.setstate(python)
            np.random.set_state(numpys)


def not_compiled() -> contextlib.AbstractContextManager[object]:
    """Return a context in which compiled blocks run eagerly, because operations inside compiled code are not seen."""
    # A script that has compiled anything has imported this module. Other scripts need not wait for the import.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else contextlib.nullcontext()
