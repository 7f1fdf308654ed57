"""What tests look at in a gradient slot."""

from __future__ import annotations

from torch import Tensor

from elastrain.runtime.model.gradients import GradientSlot


def flats_of(slot: GradientSlot, block: int) -> list[Tensor]:
    """The block's whole gradients, 1-D views."""
    return [slot._flat(each.index) for each in slot._layout.flats if each.block == block and each.trained]
