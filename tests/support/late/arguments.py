"""Arguments of an operator that do not lie on the device: refused as CUDA refuses them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.support.late import private_names as private

INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")
"""Operators whose index may lie on the CPU: CUDA copies it."""
ON_HOST = {
    "aten::_pack_padded_sequence": {"lengths"},
    "aten::_fused_adam_.tensor_lr": {"lr"},
    "aten::_fused_adamw_.tensor_lr": {"lr"},
    "aten::_fused_sgd_.tensor_lr": {"lr"},
    "aten::_fused_adagrad_.tensor_lr": {"lr"},
}
"""Arguments that CUDA takes on the CPU, whatever their size."""


def refuse(operator: str, argument: str, tensor: Tensor, is_written: bool) -> None:
    """Raise torch's own words for an argument that lies elsewhere, unless CUDA takes it."""
    if tensor.device.type == "cpu" and not is_written:
        if argument in ON_HOST.get(operator, ()):
            return
        if not tensor.dim() and (operator in private.elementwise() or operator.startswith("aten::_foreach_")):
            return
        if argument == "indices" and operator.startswith(INDEXING):
            return
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, late:0 and {tensor.device}! "
        f"(when checking argument for argument {argument} in method {operator})"
    )


def refuse_generator(given: Any, own: Any) -> None:
    if given is not None and given._cdata != own._cdata:
        raise RuntimeError(f"Expected a 'late' device type for generator but found '{given.device.type}'")
