"""The stall of moves in the experiment with pipelines: which steps count, and with what they are compared."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.pipeline.migration import handovers, stalls


def passed(*lengths_s: float) -> list[dict[str, Any]]:
    """The lines of a member: step 0 ends at 0, and step n takes the n-th length."""
    times = [sum(lengths_s[:step]) for step in range(len(lengths_s) + 1)]
    return [{"event": "passed", "step": step, "t": t} for step, t in enumerate(times)]


def test_the_step_that_waits_for_the_publish_of_a_plan_at_once_counts() -> None:
    lengths = [9.0, 1.0, 1.0, 1.0, 1.0, 3.0, 2.25, 2.0, 2.0, 2.0, 2.0]
    lines = [*passed(*lengths), *({"event": "plan", "step": step} for step in (1, 6))]
    moves = handovers({"m0": lines})
    assert moves == [(5, 5)]
    assert stalls(lines, moves).seconds == pytest.approx([1.25])


def test_a_step_is_compared_with_those_of_its_plan_beside_the_move() -> None:
    lengths = [9.0, 1.0, 1.0, 1.0, 1.5, 2.0, 2.0, 2.0, 2.0, 2.0, 5.0, 5.5, 5.0, 5.0, 5.0, 5.0, 5.0]
    moves = [(4, 5), (10, 11)]
    lines = [*passed(*lengths), *({"event": "moved", "named": n, "step": e, "is_dropped": False} for n, e in moves)]
    assert handovers({"m0": lines}) == moves
    assert stalls(lines, moves).seconds[0] == pytest.approx(0.5)
