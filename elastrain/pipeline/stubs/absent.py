"""What stands for a parameter of a block that a member does not have: one NaN, so that accidental use shows."""

from __future__ import annotations

import torch
from torch import Tensor


def absent(parameter: Tensor) -> Tensor:
    """One NaN, expanded to the parameter's shape: as many bytes as one element, instead of its memory."""
    nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)
