"""experiments/comm_recovery: how its figures are made of trials."""

from __future__ import annotations

import pytest

from experiments.comm_recovery.members import Trial
from experiments.comm_recovery.run import WORLDS, extrapolate, figures


def test_a_line_and_a_parabola_are_found_again() -> None:
    assert extrapolate(WORLDS, [1 + 2 * (world - 1) for world in WORLDS], 1000, degree=1) == pytest.approx(1999)
    assert extrapolate(WORLDS, [3.0 * (world - 1) ** 2 for world in WORLDS], 101, degree=2) == pytest.approx(30_000)


def test_what_is_measured_never_shrinks_with_size() -> None:
    assert extrapolate((2, 4, 8), [3.0, 2.0, 1.0], 1000, degree=2) == pytest.approx(2.0)


def test_ratios_are_taken_at_eight_and_the_store_counts_for_the_rebuild() -> None:
    found = {
        (name, world): [Trial(wall_s=wall_s * world, busiest_s=0.001 * world, store_s=store_s * (world - 1) ** 2)]
        for name, wall_s, store_s in (("edit", 0.001, 0.0), ("full", 0.04, 1e-5), ("partial", 0.004, 1e-6))
        for world in WORLDS
    }
    values = figures(found)
    assert values["edit_s"] == 0.008
    assert (values["vs_full"], values["vs_partial"]) == (pytest.approx(40), pytest.approx(4))
    assert values["vs_torchft"] is None and "not installed" in values["torchft_reason"]
    assert values["full_1000_s"] == pytest.approx(1e-5 * 999**2) and values["edit_1000_s"] == pytest.approx(1.0)
