"""The tracing pass of a member: the body of the user's loop runs once with every block on fake tensors.

It has no effect on the step: the batch is loaded again for its own micro-batch, and random streams start again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from elastrain.base.thread_status import Station
from elastrain.pipeline.graph import BlockGraph, check_stages
from elastrain.pipeline.stubs.trace import TracedModel, TracingPass
from elastrain.runtime.loop.computed_run import StepParts, load, went_by


class TracingRun:
    """An iterator over the one batch of the tracing pass. After one call of `backward`, `traced` has the result."""

    micro_batch = 0
    figures = None
    """Figures are not collected: the micro-batch is computed again."""

    def __init__(self, step: int, parts: StepParts, model: nn.Module, stages: int) -> None:
        self.backward_is_due = False
        self.traced: TracedModel | None = None
        self._step, self._parts, self._stages = step, parts, stages
        self._pass = TracingPass(model, [block for block in parts.model.layout.blocks if block])

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts
        # The same batch on all members and newcomers: they compare graphs, and the data may decide which blocks run.
        data = load(parts, 0, self.micro_batch)
        parts.whereabouts.enter(Station.COMPUTING, self._step)
        parts.randomness.begin(0, self.micro_batch)
        self.backward_is_due = True
        try:
            self._pass.begin()
            yield data
        finally:
            self._pass.abandon()
        if self.backward_is_due:
            raise went_by(f"the first batch of step {self._step}")

    def backward(self, loss: Tensor, weight: float) -> None:
        """End the pass after the forward. Raises ConfigError if the model cannot be cut into the wanted stages."""
        self.backward_is_due = False
        self.traced = self._pass.finish()
        check_stages(self.traced.graph, self._stages)


def places_of(blocks: Sequence[str], graph: BlockGraph) -> tuple[int, ...]:
    """Return the place in the graph of each block of the layout."""
    places = {name: place for place, name in enumerate(graph.blocks)}
    beside = dict(graph.never_entered)
    # Parameters outside of all blocks go with the first block. A cut before code that uses them is not legal.
    return tuple(places[beside.get(name, name)] if name else 0 for name in blocks)
