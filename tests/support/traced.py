"""One call of a forward as a tracing pass, without a job around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from elastrain.pipeline.stubs.trace import TracedModel, TracingPass


def trace(model: nn.Module, blocks: Sequence[str], forward: Callable[[], object]) -> TracedModel:
    """Trace one call of `forward`, which is to run the model on one micro-batch. Raises ConfigError."""
    tracing = TracingPass(model, blocks)
    try:
        tracing.begin()
        forward()
        return tracing.finish()
    finally:
        tracing.abandon()
