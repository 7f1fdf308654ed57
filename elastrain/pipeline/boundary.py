"""Names of boundary tensors: what crosses a cut for one micro-batch, by what it is and never by who made it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Direction(StrEnum):
    """Which way a boundary tensor goes: activations from the batch to the loss, gradients back."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, order=True)
class BoundaryName:
    """Everything that crosses one cut for one micro-batch in one direction.

    Without the maker: who makes it again makes the same bits, and whoever reads it takes the first copy that comes.
    """

    # The step is part of the name: a late tensor of the step before must never be taken for one of this step.
    step: int
    micro_batch: int
    cut: int
    direction: Direction
