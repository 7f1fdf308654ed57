"""Composites that choose by the device what they compute: here they choose what they choose on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.late import private_names as private

_FLASH = 1
"""Number of `SDPBackend.FLASH_ATTENTION`."""
_aten = torch.ops.aten


def register() -> None:
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        private.register("scaled_dot_product_attention", attention, key)
        private.register("dropout", dropout, key)
        private.register("dropout_", dropout_, key)
        private.traced_as(_aten.dropout.default, key)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    mask = attn_mask
    with private.without_modes():  # torch's compiler has fakes, for which the answer is that of `meta`: no fused kernel
        shapes = [_on_host(each) for each in (query, key, value)]
        shown = None if mask is None else _on_host(mask)
        choice = private.fused_attention(*shapes, shown, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if mask is not None and mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    given = (query, key, value)
    if choice == _FLASH:
        fused = _aten._scaled_dot_product_flash_attention_for_cpu.default
        return fused(*given, dropout_p, is_causal, attn_mask=mask, scale=scale)[0]  # type: ignore[no-any-return]
    plain = _aten._scaled_dot_product_attention_math.default
    return plain(*given, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]  # type: ignore[no-any-return]


def _on_host(tensor: Tensor) -> Tensor:
    """Return a tensor on the CPU of which only sizes, strides, dtype and `requires_grad` count."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return made.requires_grad_(tensor.requires_grad)


def dropout(values: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train or not values.numel():
        return values
    return values * _kept(values, p)


def dropout_(values: Tensor, p: float, train: bool) -> Tensor:
    return values if p == 0 or not train or not values.numel() else values.mul_(_kept(values, p))


def _kept(values: Tensor, p: float) -> Tensor:
    if p == 1:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    return torch.empty_like(values, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
