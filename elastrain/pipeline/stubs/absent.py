"""Parameters of blocks that a member does not hold: one NaN of the right shape, so that accidental use shows."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn


def let_go(model: nn.Module, blocks: Collection[str], kept: Collection[str]) -> dict[str, Tensor]:
    """Free the parameters of `blocks`, but for those that a block of `kept` shares. Returns what was freed, by name.

    Each becomes one NaN, expanded to its shape: four bytes instead of its memory.
    """
    staying = {id(parameter) for name in kept for parameter in model.get_submodule(name).parameters()}
    freed: dict[str, Tensor] = {}
    for name in blocks:
        for of_block, parameter in model.get_submodule(name).named_parameters():
            if id(parameter) not in staying and not _is_absent(parameter):
                freed[f"{name}.{of_block}"] = parameter.data
                nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
                parameter.data = nan.expand(parameter.shape)
    return freed


def bring_back(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give parameters that were let go of their values, by name."""
    for name, value in values.items():
        model.get_parameter(name).data = value


def _is_absent(parameter: nn.Parameter) -> bool:
    return parameter.numel() > 1 and not any(parameter.stride())
