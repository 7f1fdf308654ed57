"""Boundary tensors of the open step that this member has made or received, for its own tasks and for others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastrain.books.ports import Tensor
from elastrain.messages import Boundary
from elastrain.pipeline.boundary import BoundaryName
from elastrain.values import Contribution


@dataclass(frozen=True, eq=False)
class KeptBoundary:
    """A boundary tensor as its message describes it, and the tensors themselves."""

    message: Boundary
    tensors: Sequence[Tensor]

    @property
    def contribution(self) -> Contribution | None:
        """What came with a gradient of the micro-batch's loss: a task above counts it for its own blocks."""
        return self.message.contribution


class Boundaries:
    """Owns them from when they are made or come until their step is over. The first copy stays."""

    def __init__(self) -> None:
        self._kept: dict[BoundaryName, KeptBoundary] = {}

    def put(self, message: Boundary, tensors: Sequence[Tensor]) -> None:
        """Keep it, unless one of this name is here."""
        # The one that is here may be being read, by this member or by others, and the other has the same bits.
        self._kept.setdefault(message.name, KeptBoundary(message, tensors))

    def __getitem__(self, name: BoundaryName) -> KeptBoundary:
        return self._kept[name]

    def end_step(self, step: int) -> None:
        """Let go of what belongs to this step and to older ones."""
        # No member votes while it has tasks left: whoever holds the record knows that nobody reads these any more.
        self._kept = {name: kept for name, kept in self._kept.items() if name.step > step}
