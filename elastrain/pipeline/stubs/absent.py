"""Placeholders for parameters of blocks that a member does not have: one NaN, and a sentence if the script uses it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elastrain.errors import ConfigError

ON_RANK_0 = (
    "because its memory limit left no room for all blocks at the end of the loop: the whole model is on rank 0, so use "
    "it there (if job.rank == 0)"
)
"""Why a block is still absent behind the loop, and what to do."""
_HARMLESS = (
    "__get__ __set__ __len__ _is_view data_ptr dim element_size get_device is_complex is_contiguous is_floating_point "
    "is_pinned is_shared nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ retain_grad "
    "size storage_offset stride untyped_storage empty_like full_like ones_like rand_like randn_like zeros_like "
    "new_empty new_full new_ones new_zeros"
)
"""Names of functions that neither read nor write values."""
_VALUES = frozenset({"data", "T", "H", "mT", "mH", "real", "imag"})


def absent(parameter: Tensor) -> Tensor:
    """Return one NaN, expanded to the parameter's shape: as many bytes as one element, instead of its memory."""
    nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)


class AbsentParameter(nn.Parameter):
    """The class of a parameter while its values are not on this member. Code outside of a forward may not use them."""

    computing: ClassVar[set[object]] = set()
    """The stubs that run a forward or a backward of a micro-batch: they see to it that no NaN counts there."""

    @staticmethod
    def mark(parameter: nn.Parameter, name: str | None) -> None:
        """Guard a parameter of this name. None: its values are here, so take the guard off."""
        # In this order: the main thread may use it meanwhile.
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
