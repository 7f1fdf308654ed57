"""The profile of a job: it begins with FLOPs, medians smooth it, and slow members are told from dear blocks."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest

from elastrain.pipeline.graph import CrossingTensor
from elastrain.pipeline.planner.step_profile import (
    NOISE,
    BlockSeconds,
    Gauge,
    JobProfile,
    StepRates,
    fitted,
    profile_of,
    with_rates,
)
from tests.support.block_graphs import graph_of
from tests.support.step_profiles import profile_with


def seconds(forward_s: float) -> BlockSeconds:
    return BlockSeconds(forward_s=forward_s, input_gradient_s=forward_s, weight_gradient_s=forward_s)


def test_a_profile_begins_with_flops_and_what_crosses_the_cuts() -> None:
    tensor = CrossingTensor(shape=(8,), stride=(1,), dtype="float32", itemsize=4, requires_grad=True)
    mask = replace(tensor, dtype="int64", itemsize=8, requires_grad=False)
    graph = replace(graph_of([1, 3]), crossings=((), (tensor, mask), ()))
    profile = profile_of(graph, [10, 20], flops_per_s=2.0)
    assert profile.blocks == (seconds(0.5), seconds(1.5))
    assert profile.activation_bytes == (0, 32 + 64, 0)
    assert profile.gradient_bytes == (0, 32, 0)
    assert profile.parameter_bytes == (10, 20)


def test_blocks_without_flops_are_taken_as_even() -> None:
    assert profile_of(graph_of([0, 0]), [1, 1], flops_per_s=1.0).blocks == (seconds(1.0), seconds(1.0))


def test_a_profile_is_a_value_that_travels_as_json() -> None:
    rates = StepRates(links=(("a", "b", 3.0),), message_s=0.25)
    profile = replace(profile_with([1.0, 2.0], speeds={"a": 0.5}, rates=rates), nodes={"a": "n0"})
    assert msgspec.json.decode(msgspec.json.encode(profile), type=JobProfile) == profile
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(profile), type=JobProfile) == profile


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"blocks": (seconds(math.nan), seconds(1.0))}, "forward_s of block 0 must be a number of at least 0; got nan"),
        ({"blocks": (seconds(1.0), seconds(-1.0))}, "forward_s of block 1 must be a number of at least 0"),
        ({"speeds": {"a": 0.0}}, "the speed of a must be above 0; got 0.0"),
        ({"speeds": {"a": math.inf}}, "the speed of a must be above 0; got inf"),
        ({"rates": StepRates(publish_bytes_per_s=0.0)}, "publish_bytes_per_s must be above 0"),
        ({"rates": StepRates(links=(("a", "b", math.nan),))}, "the rate from a to b must be above 0"),
        ({"rates": StepRates(action_s=math.nan)}, "action_s must be a number of at least 0"),
        ({"rates": StepRates(message_s=math.nan)}, "message_s must be a number of at least 0"),
        ({"rates": StepRates(split_price=-0.1)}, "split_price must be a number of at least 0"),
        ({"parameter_bytes": (1,)}, "bytes for each of its 2 blocks"),
    ],
)
def test_a_profile_that_no_plan_can_rest_on_is_refused(change: dict[str, object], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        replace(profile_with([1.0, 1.0]), **change)


def test_one_noisy_step_moves_nothing() -> None:
    gauge = Gauge()
    told = [gauge.news() for value in [1.0, 1.01, 0.99, 1.0, 9.0, 1.0, math.nan, -1.0, 1.0] for _ in [gauge.add(value)]]
    assert [each for each in told if each is not None] == [1.0]


def test_what_changes_by_more_than_its_noise_is_told_once() -> None:
    gauge = Gauge()
    told = []
    for value in [1.0] * 5 + [1.0 + NOISE / 2] * 5 + [2.0] * 5:
        gauge.add(value)
        told.append(gauge.news())
    assert [each for each in told if each is not None] == [1.0, 2.0]


def test_a_member_that_takes_twice_as_long_for_its_blocks_has_half_the_speed() -> None:
    measured = {m: {at: seconds(6.0 if m == "c" else 3.0)} for at, m in enumerate("abcd")}
    found = fitted(profile_with([1.0] * 4), measured)
    assert found.speeds == {"a": 1.0, "b": 1.0, "c": 0.5, "d": 1.0}
    assert found.blocks == (seconds(3.0),) * 4
    # And it stays so: what is known already is no news.
    assert fitted(found, measured) == found


def test_a_member_with_more_blocks_is_not_slow_and_a_dear_block_makes_no_member_slow() -> None:
    measured = {"a": {0: seconds(9.0), 1: seconds(1.0), 2: seconds(1.0)}, "b": {3: seconds(1.0)}}
    found = fitted(profile_with([1.0] * 4), measured)
    assert found.speeds == {"a": 1.0, "b": 1.0}
    assert found.blocks[0] == seconds(9.0)


def test_members_that_told_nothing_keep_their_speeds() -> None:
    profile = profile_with([1.0, 1.0], speeds={"a": 0.5})
    assert fitted(profile, {}) == profile
    assert fitted(profile, {"b": {1: seconds(1.0)}}).speeds == {"a": 0.5, "b": 1.0}


def test_told_fixed_times_and_links_come_into_the_profile() -> None:
    told = {"a": {"action_s": 0.1, "step_s": 3.0, "b": 5e6}, "b": {"action_s": 0.3, "step_s": 2.0, "a": 4e6}, "c": {}}
    told["c"] = {"action_s": 0.2, "gone": 1.0, "a": 8e12}
    rates = with_rates(profile_with([1.0]), told, moved_bytes=40_000_000).rates
    assert rates.action_s == 0.2, "the median of all members"
    assert rates.links == (("a", "b", 4e6), ("a", "c", 1e9)), "the slower way; no link is faster than links are"
    assert rates.publish_bytes_per_s == rates.reduce_bytes_per_s == rates.between_bytes_per_s == (4e6 + 1e9) / 2
    assert rates.step_s == pytest.approx(2.0 - 40e6 / rates.publish_bytes_per_s), "the others only wait longer"


def test_a_profile_of_which_nothing_was_told_stays() -> None:
    assert with_rates(profile_with([1.0]), {"a": {}}, moved_bytes=1) == profile_with([1.0])
