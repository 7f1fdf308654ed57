"""Placeholders for parameters that a member does not have, and the replacement of `forward` at the entries of blocks.

A placeholder holds one NaN, and raises ConfigError if the script uses its values. `Entries` sends each call of a block
through one function.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elastrain.errors import ConfigError, CutError
from elastrain.pipeline.stubs.naming import module_of

ON_RANK_0 = (
    "because its memory limit left no room for all blocks at the end of the loop: the whole model is on rank 0, so use "
    "it there (if job.rank == 0)"
)
"""The reason why a block is still absent after the loop, and what to do."""
_HARMLESS = (
    "__get__ __set__ __len__ _is_view data_ptr dim element_size get_device is_complex is_contiguous is_floating_point "
    "is_pinned is_shared nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad "
    "size storage_offset stride untyped_storage empty_like full_like ones_like rand_like randn_like zeros_like "
    "new_empty new_full new_ones new_zeros"
)
"""Names of functions that neither read nor write values."""
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


def absent(parameter: Tensor) -> Tensor:
    """Return one NaN, expanded to the parameter's shape. It takes the memory of one element."""
    nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)


class AbsentParameter(nn.Parameter):
    """The class of a parameter whose values are not on this member. Code outside of a forward may not use them."""

    computing: ClassVar[set[object]] = set()
    """Stubs that run a forward or a backward of a micro-batch now. They ensure that no NaN gets into the result."""

    @staticmethod
    def mark(parameter: nn.Parameter, name: str | None) -> None:
        """Mark a parameter of this name as absent. With `name` None, its values are here, and the mark is removed."""
        # The order of the two assignments matters: the main thread may use the parameter meanwhile.
        if name is None:
            parameter.__class__ = nn.Parameter
            parameter.__dict__.pop("_name_in_model", None)
        else:
            parameter.__dict__["_name_in_model"] = name
            parameter.__class__ = AbsentParameter

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        own = getattr(getattr(func, "__self__", None), "__name__", None)
        if not AbsentParameter.computing and (name not in _HARMLESS.split() or own in _VALUES):
            its = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AbsentParameter))
            raise ConfigError(
                f"parameter {its.__dict__.get('_name_in_model')!r} is not on this member of a pipeline, and code "
                f"outside of a micro-batch's forward uses its values ({own or name}): use the model behind the loop "
                "over job.steps(…), on rank 0, or train without --stages; step.grad_norm is the norm of all gradients"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_COMPILED = (
    "the whole model is compiled, and a pipeline needs the code between its blocks: compile each block instead "
    "(for block in model.layers: block.compile())"
)
_DYNAMO = str(Path("torch", "_dynamo", "eval_frame.py"))
Forward = Callable[..., Any]
Entry = Callable[[int, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""(place of the block, its own forward, args, kwargs) -> what the block returns."""


class Entries:
    """A replacement of each block's `forward` on the module itself, so that hooks before and after it keep working.

    For a compiled block the compiled call is replaced as a whole, because the compiler must not look into an entry.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], entry: Entry) -> None:
        """Replace the forward of every block. Raises CutError if the model is compiled as a whole."""
        check_not_compiled(model)
        self._replaced: list[tuple[nn.Module, str, Forward | None]] = []
        for place, name in enumerate(blocks):
            module = module_of(model, name)
            attribute = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
            self._replaced.append((module, attribute, module.__dict__.get(attribute)))
            setattr(module, attribute, _Way(entry, place, getattr(module, attribute)))

    def close(self) -> None:
        """Restore the forward of every block. A second call does nothing."""
        for module, attribute, own in self._replaced:
            if own is None:
                delattr(module, attribute)
            else:
                setattr(module, attribute, own)
        self._replaced = []


class _Way:
    """A stand-in for a block's forward. A copy of it raises ConfigError, because it would call the original block."""

    def __init__(self, entry: Entry, place: int, forward: Forward) -> None:
        self._entry, self._place, self.forward = entry, place, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._entry(self._place, self.forward, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_refuse_copy,)


def behind_entry(module: nn.Module) -> Forward:
    """Return a block's own forward, which no entry and no hook of the block itself precedes."""
    forward: Forward = module.forward if module._compiled_call_impl is None else module._compiled_call_impl
    return forward.forward if isinstance(forward, _Way) else forward


def _refuse_copy(*_: object, **__: object) -> NoReturn:
    raise ConfigError(
        "this model was copied in the loop of a job with --stages, and such a copy cannot compute: copy it before "
        "job.prepare(…) or behind the loop over job.steps(…)"
    )


def check_not_compiled(model: nn.Module) -> None:
    """Raise CutError if the model is compiled as a whole, because then no code between its blocks can be seen."""
    # A script that has compiled anything has imported this module. Other scripts need not wait for the import.
    dynamo = sys.modules.get("torch._dynamo")
    is_wrapped = dynamo is not None and isinstance(model, dynamo.OptimizedModule)
    if is_wrapped or model._compiled_call_impl is not None:
        raise CutError(_COMPILED)


def check_caller_not_compiled() -> None:
    """Raise CutError if the caller is compiled code, such as a wrapper that `torch.compile` has returned."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "compile_wrapper" and code.co_filename.endswith(_DYNAMO):
            raise CutError(_COMPILED)
        frame = frame.f_back
