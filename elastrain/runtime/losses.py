"""What `step.backward` is given, checked: the loss of a micro-batch and what it counts. No state, no gradients."""

from __future__ import annotations

import math
from typing import Any, SupportsFloat

import numpy as np
from torch import Tensor

from elastrain.errors import ConfigError


def check_loss(loss: Any) -> None:
    """Raises ConfigError unless `loss` is a scalar of real numbers that has a graph."""
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
    """What a micro-batch counts, as a plain number: from any number, NumPy's too, or a tensor of one element.

    Raises ConfigError for what is no number, not finite or negative.
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
        return float(weight.detach()) if weight.numel() == 1 and not weight.is_complex() else None
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


def _what(weight: Any) -> str:
    if isinstance(weight, Tensor | np.ndarray):
        return f"a {type(weight).__name__} of shape {tuple(weight.shape)} and {weight.dtype}"
    return f"{weight!r}" if isinstance(weight, str | bytes) else f"a {type(weight).__name__}"
