"""Numbers that a script gives to a step: losses, weights, and figures to add up. Each is checked in one place."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor

from elastrain.errors import ConfigError

NAME_LENGTH_MAX = 100
"""Characters of the longest name of a figure. Its sum travels with every partial of the step."""


def check_loss(loss: Any) -> None:
    """Raise ConfigError unless `loss` is a real scalar tensor with a graph."""
    if not isinstance(loss, Tensor):
        raise ConfigError(
            f"step.backward() takes the loss of a micro-batch as a tensor with its graph; got {type(loss).__name__}: "
            "pass the loss itself, not loss.item()"
        )
    if loss.numel() != 1 or not loss.requires_grad:
        raise ConfigError(
            f"step.backward() takes the scalar loss of a model in training; got shape {tuple(loss.shape)}"
            + ("" if loss.requires_grad else " without a gradient: is everything under torch.no_grad()?")
        )
    if not loss.is_floating_point():
        raise ConfigError(f"step.backward() takes a loss of real numbers; got {loss.dtype}: use its .abs() or .real")


def weight_of(weight: Any) -> float:
    """Return the weight of a micro-batch as a float, from any number or from a tensor or array of one element.

    Raises ConfigError if it is no number, not finite, or negative.
    """
    number = _number(weight)
    if number is None:
        raise ConfigError(
            f"step.backward(weight=…) takes one number for the whole micro-batch; got {_what(weight)}: "
            "sum it up, as in weight=mask.sum()"
        )
    if not math.isfinite(number) or number < 0.0:
        raise ConfigError(
            f"step.backward(weight=…) takes a finite number from 0 on, such as the micro-batch's tokens; got {number}"
        )
    return number


def _number(weight: Any) -> float | None:
    if isinstance(weight, Tensor):
        return float(weight.detach()) if weight.numel() == 1 and _is_real(weight) and not weight.is_meta else None
    if isinstance(weight, np.ndarray):
        return float(weight.item()) if weight.size == 1 and weight.dtype.kind in "biuf" else None
    if isinstance(weight, str | bytes | np.complexfloating) or not isinstance(weight, SupportsFloat):
        return None
    try:
        return float(weight)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        return None


def _is_real(tensor: Tensor) -> bool:
    """Return True if its elements become floats. Those of complex, quantized and sub-byte dtypes do not."""
    if tensor.is_complex() or tensor.is_quantized or tensor.is_nested:
        return False
    try:
        float(torch.empty((), dtype=tensor.dtype, device="cpu"))
    except NotImplementedError:
        return False
    return True


def _what(weight: Any) -> str:
    if isinstance(weight, Tensor | np.ndarray):
        return f"a {type(weight).__name__} of shape {tuple(weight.shape)} and {weight.dtype}"
    return f"{weight!r}" if isinstance(weight, str | bytes) else f"a {type(weight).__name__}"


def check_name(name: Any) -> None:
    """Raise ConfigError unless `name` can name a figure of `step.add`."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH_MAX:
        raise ConfigError(f"step.add(name, n) takes a name of 1 to {NAME_LENGTH_MAX} characters; got {name!r:.120}")


def figure_of(name: str, value: Any) -> float | Tensor:
    """Return a figure as a float or, if it lies on a device, as the tensor, so that the loop waits for no device.

    Raises ConfigError if it is not one real number.
    """
    if isinstance(value, Tensor) and value.device.type != "cpu" and value.numel() == 1 and _is_real(value):
        return value
    number = _number(value)
    if number is None:
        raise ConfigError(
            f"step.add({name!r}, n) takes one number of the micro-batch; got {_what(value)}: sum it up, as in "
            "(guess == target).sum()"
        )
    return number
