"""The tracing pass of a member: the body of the user's loop, once over a batch with every block on fakes.

It counts for nothing: the batch is loaded again for its own micro-batch, and the random streams begin anew there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from elastrain.base.places import Station
from elastrain.pipeline.graph import BlockGraph, check_stages
from elastrain.pipeline.stubs.trace import TracedModel, TracingPass
from elastrain.runtime.run import StepParts, load, went_by


class TracingRun:
    """Iterate over it for its one batch, and call `backward` once; then `traced` is there."""

    micro_batch = 0

    def __init__(self, step: int, parts: StepParts, model: nn.Module, stages: int) -> None:
        self.backward_is_due = False
        self.traced: TracedModel | None = None
        self._step, self._parts, self._stages = step, parts, stages
        self._pass = TracingPass(model, [block for block in parts.model.layout.blocks if block])

    def __iter__(self) -> Iterator[Any]:
        parts = self._parts
        # The same for all, newcomers too: graphs are compared, and what is in it may say which blocks are entered.
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
        """The forward is over. Raises ConfigError for a model that cannot be cut into so many stages."""
        self.backward_is_due = False
        self.traced = self._pass.finish()
        check_stages(self.traced.graph, self._stages)


def places_of(blocks: Sequence[str], graph: BlockGraph) -> tuple[int, ...]:
    """Per block of the layout, its place in the graph."""
    places = {name: place for place, name in enumerate(graph.blocks)}
    beside = dict(graph.never_entered)
    # Parameters outside of all blocks go with the first one: code that uses them behind a cut forbids that cut.
    return tuple(places[beside.get(name, name)] if name else 0 for name in blocks)
