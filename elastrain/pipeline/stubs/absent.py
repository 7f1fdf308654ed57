"""What stands for a parameter of a block that a member does not have: one NaN, so that accidental use shows."""

from __future__ import annotations

import torch
from torch import Tensor

ON_RANK_0 = (
    "because its memory limit left no room for all blocks at the end of the loop: the whole model is on rank 0, so use "
    "it there (if job.rank == 0)"
)
"""Why a block is still absent behind the loop, and what to do."""


def absent(parameter: Tensor) -> Tensor:
    """One NaN, expanded to the parameter's shape: as many bytes as one element, instead of its memory."""
    nan = torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device)
    return nan.expand(parameter.shape)
