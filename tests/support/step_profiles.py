"""Profiles of steps for tests of the planner, without any measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from elastrain.pipeline.planner.step_profile import BlockSeconds, JobProfile, StepRates

FREE = StepRates(inside_bytes_per_s=1e15, between_bytes_per_s=1e15, reduce_bytes_per_s=1e15, publish_bytes_per_s=1e15)
"""Rates at which bytes cost nothing."""


def profile_with(
    forward_s: Sequence[float],
    *,
    speeds: Mapping[str, float] | None = None,
    rates: StepRates = FREE,
    crossing_bytes: int = 0,
    parameter_bytes: int = 1,
) -> JobProfile:
    """Blocks with these seconds of forward; each half of a backward takes as long. The same bytes cross every cut."""
    n = len(forward_s)
    inner = (0, *[crossing_bytes] * (n - 1), 0)
    return JobProfile(
        blocks=tuple(BlockSeconds(forward_s=s, input_gradient_s=s, weight_gradient_s=s) for s in forward_s),
        activation_bytes=inner,
        gradient_bytes=inner,
        parameter_bytes=(parameter_bytes,) * n,
        speeds=speeds or {},
        rates=rates,
    )
