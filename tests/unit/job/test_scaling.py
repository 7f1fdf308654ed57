"""The loss scale follows torch.amp.GradScaler's rule, and is the same on whoever computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastrain.errors import ConfigError
from elastrain.job.scaling import LEAST_SCALE, UNSCALED, LossScale, Scaler, advance, rule_of


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5))
def test_scale_and_counter_are_those_of_torch(overflows: list[bool], interval: int) -> None:
    rule = LossScale(initial=1024.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=interval)
    scale, tracker = torch.tensor(1024.0), torch.tensor(0, dtype=torch.int32)
    scaler = rule.start
    for overflow in overflows:
        scaler = advance(rule, scaler, overflow=overflow)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 3.0, 0.25, interval)
        if float(scale) < 2 * LEAST_SCALE or float(scale) > 2.0**100:
            break  # torch has no floor, and float32 rounds
        assert scaler.scale == pytest.approx(float(scale), rel=1e-6)
        assert scaler.clean_steps == int(tracker)


def test_a_fixed_scale_never_moves() -> None:
    rule = rule_of(128)
    assert advance(rule, rule.start, overflow=True) == advance(rule, rule.start, overflow=False) == Scaler(scale=128.0)


def test_endless_overflow_does_not_bring_the_scale_to_zero() -> None:
    rule, scaler = LossScale(), LossScale().start
    for _ in range(2000):
        scaler = advance(rule, scaler, overflow=True)
    assert scaler.scale == LEAST_SCALE


def test_endless_growth_stays_finite() -> None:
    rule = LossScale(growth_interval=1)
    scaler = rule.start
    for _ in range(3000):
        scaler = advance(rule, scaler, overflow=False)
    assert scaler.scale < float("inf")


def test_what_users_write_becomes_a_rule() -> None:
    assert rule_of(None) == UNSCALED
    assert rule_of("dynamic") == LossScale(initial=65536.0, growth_interval=2000)
    assert rule_of(LossScale(initial=8.0)) == LossScale(initial=8.0)


@pytest.mark.parametrize("setting", ["static", True, 0, -1.0, float("nan"), float("inf"), [1.0]])
def test_anything_else_is_refused(setting: object) -> None:
    with pytest.raises(ConfigError, match="loss"):
        rule_of(setting)


@pytest.mark.parametrize(
    "fields", [{"growth_factor": 1.0}, {"backoff_factor": 1.0}, {"growth_interval": -1}, {"growth_interval": True}]
)
def test_a_rule_that_cannot_work_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        LossScale(**fields)  # type: ignore[arg-type]
