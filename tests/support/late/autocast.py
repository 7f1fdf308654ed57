"""Autocast on the device: the operators and dtypes of the CPU's autocast, and its cache of weights that were cast."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from tests.support.late import private_names as private
from tests.support.late.memory import NAME

LOWER = {
    *("_addmm_activation", "_convolution.deprecated", "_native_multi_head_attention", "addbmm", "addmm", "baddbmm"),
    *("bmm", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d", "conv3d.padding", "conv_tbc"),
    *("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input", "linear", "matmul", "mkldnn_rnn_layer"),
    *("mm", "scaled_dot_product_attention"),
}
"""Operators that compute in the dtype of the autocast."""
PROMOTED = {"cat", "index_copy", "stack"}
"""Operators that compute in the widest dtype of their arguments; all that the CPU casts otherwise are in float32."""
_KEY = "AutocastPrivateUse1"
_cast: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}


def register() -> None:
    private.register_for_all(private.fall_through, _KEY)
    names = {n.removeprefix("aten::") for n in private.all_operators() if private.has_kernel(n, "AutocastCPU")}
    if unknown := (LOWER | PROMOTED) - names:
        raise RuntimeError(f"the CPU's autocast of torch {torch.__version__} has no {', '.join(sorted(unknown))}")
    for name in names:
        private.register(name, _kernel(name, private.overload(name)), _KEY)
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        _cast.clear()

    torch.clear_autocast_cache = clear_both


def _kernel(name: str, operator: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if name in PROMOTED:
            dtype = _widest([args, kwargs])
        else:
            dtype = torch.get_autocast_dtype(NAME) if name in LOWER else torch.float32
        with private.without_keys(private.AUTOCAST_KEYS):
            return operator(*_as(dtype, args), **{key: _as(dtype, value) for key, value in kwargs.items()})

    return kernel


def _widest(given: Any) -> torch.dtype:
    dtypes = {each.dtype for each in _tensors(given)}
    return torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype(NAME)


def _tensors(given: Any) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given] if _is_cast(given) else []
    if isinstance(given, dict):
        given = list(given.values())
    return [found for each in given for found in _tensors(each)] if isinstance(given, list | tuple) else []


def _is_cast(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type == NAME and tensor.dtype is not torch.float64


def _as(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_as(dtype, each) for each in value)
    if not isinstance(value, Tensor) or not _is_cast(value) or value.dtype is dtype:
        return value
    is_weight = value.dtype is torch.float32 and value.requires_grad and value.is_leaf and not value._is_view()
    if not (is_weight and dtype is torch.get_autocast_dtype(NAME) and torch.is_autocast_cache_enabled()):
        return value.to(dtype)
    owner, cast = _cast.get(id(value), (None, None))
    if owner is None or owner() is not value or cast is None:
        cast = value.to(dtype)
        _cast[id(value)] = weakref.ref(value), cast
    return cast
