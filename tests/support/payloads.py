"""What partials carry between members, made by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from elastrain.snapshot.digest import checksum


def sent(tensor: Tensor) -> list[Tensor]:
    """As it comes from another member: after its checksum."""
    return [torch.tensor([checksum(tensor) - (1 << 63)]), tensor]
