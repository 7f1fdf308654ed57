"""Lets a model's blocks go by name, as a member of a pipeline does that was never prepared."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from elastrain.pipeline.stubs.placeholders import absent


def let_go(model: nn.Module, blocks: Collection[str], kept: Collection[str]) -> dict[str, Tensor]:
    """Free the parameters of `blocks`, but for those that a block of `kept` shares. Returns what was freed, by name."""
    staying = {id(parameter) for name in kept for parameter in model.get_submodule(name).parameters()}
    freed: dict[str, Tensor] = {}
    for name in blocks:
        for of_block, parameter in model.get_submodule(name).named_parameters():
            if id(parameter) not in staying:
                freed[f"{name}.{of_block}"] = parameter.data
                parameter.data = absent(parameter)
                staying.add(id(parameter))
    return freed


def bring_back(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Give parameters that were let go of their values, by name."""
    for name, value in values.items():
        model.get_parameter(name).data = value
