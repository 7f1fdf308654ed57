"""How much to spill and what to fetch or give up, on values."""

from __future__ import annotations

from elastrain.offload.activations.spill_policy import (
    IN_FLIGHT_AT_LEAST,
    IN_FLIGHT_STORAGES,
    PROBE_EVERY_PASSES,
    Basis,
    Candidate,
    Planner,
    Saved,
    changed,
    choose_amount,
    choose_evictions,
    choose_prefetch,
    reading_ahead_bytes,
    turns,
)
from elastrain.offload.planning.profile import Lifetime, PassProfile
from elastrain.offload.planning.profile import Path as Way

MB = 1_000_000


def evenly(count: int, size_bytes: int, forward_s: float) -> list[Saved]:
    return [Saved(size_bytes=size_bytes, saved_s=forward_s * i / count) for i in range(count)]


def amount(device_bytes_per_s: float, limit_bytes: int | None = None) -> int:
    saved = evenly(100, 10 * MB, 1.0)
    return choose_amount(saved, forward_s=1.0, device_bytes_per_s=device_bytes_per_s, limit_bytes=limit_bytes).count


def test_a_fast_device_takes_everything() -> None:
    assert amount(100e9) == 100


def test_a_slow_device_takes_what_it_can_hide_from_the_start_on() -> None:
    # (before + 2 own) / (3 T - 2 t) > bandwidth first at the 19th: 200 MB over (3 - 0.38) s against 75 MB/s.
    assert amount(75e6) == 18


def test_more_bandwidth_never_spills_less() -> None:
    counts = [amount(rate) for rate in (1e6, 1e7, 1e8, 3e8, 1e9, 1e10)]
    assert counts == sorted(counts)
    assert counts[0] == 0


def test_the_reason_names_both_rates() -> None:
    reason = choose_amount(evenly(100, 10 * MB, 1.0), forward_s=1.0, device_bytes_per_s=75e6, limit_bytes=None).reason
    assert reason.startswith("from storage 18 on")
    assert "the devices move 0.07 GB/s" in reason or "the devices move 0.08 GB/s" in reason


def test_what_fits_the_limit_is_not_written_at_all() -> None:
    assert amount(100e9, limit_bytes=1000 * MB) == 0


def test_a_limit_spills_no_more_than_is_needed() -> None:
    saved = evenly(100, 10 * MB, 1.0)
    kept = choose_amount(saved, forward_s=1.0, device_bytes_per_s=1e9, limit_bytes=400 * MB)
    assert kept.kept_bytes == 400 * MB - IN_FLIGHT_STORAGES * 10 * MB
    assert kept.spilled_bytes + kept.kept_bytes == 1000 * MB


def test_a_device_that_is_much_faster_than_the_forward_needs_less_room_for_what_is_on_its_way() -> None:
    saved = evenly(100, 10 * MB, 1.0)
    kept = choose_amount(saved, forward_s=1.0, device_bytes_per_s=4e9, limit_bytes=400 * MB)
    assert kept.kept_bytes == 400 * MB - IN_FLIGHT_AT_LEAST * 10 * MB


def test_a_tiny_limit_spills_everything() -> None:
    assert amount(1e9, limit_bytes=MB) == 100


def test_an_empty_forward_spills_nothing() -> None:
    assert choose_amount([], forward_s=0.0, device_bytes_per_s=1e9, limit_bytes=1).count == 0


def test_a_plan_holds_while_the_measurements_stay_within_a_tenth() -> None:
    basis = Basis(forward_s=1.0, total_bytes=100, count=3, device_bytes_per_s=1e9)
    assert changed(basis, Basis(forward_s=1.09, total_bytes=100, count=3, device_bytes_per_s=0.92e9)) is None
    slower = Basis(forward_s=1.0, total_bytes=100, count=3, device_bytes_per_s=0.5e9)
    assert changed(basis, slower) == "what the devices move went from 1 to 0.5 GB/s"
    other = Basis(forward_s=1.0, total_bytes=100, count=4, device_bytes_per_s=1e9)
    assert changed(basis, other) == "4 storages were saved, 3 before"


def test_reading_ahead_follows_the_order_and_stops_where_the_room_ends() -> None:
    spilled = [Candidate(turn=9, size_bytes=4), Candidate(turn=8, size_bytes=7), Candidate(turn=7, size_bytes=1)]
    assert [c.turn for c in choose_prefetch(spilled, room_bytes=11)] == [9, 8]
    assert [c.turn for c in choose_prefetch(spilled, room_bytes=10)] == [9]


def test_reading_ahead_without_a_limit_needs_no_more_than_the_forward_did() -> None:
    assert reading_ahead_bytes(limit_bytes=None, peak_bytes=100, largest_bytes=10) == 100
    assert reading_ahead_bytes(limit_bytes=90, peak_bytes=100, largest_bytes=10) == 60  # 30 are for gradients
    assert reading_ahead_bytes(limit_bytes=90, peak_bytes=80, largest_bytes=10) == 50  # never more than in forward
    assert reading_ahead_bytes(limit_bytes=40, peak_bytes=100, largest_bytes=10) == 20
    assert reading_ahead_bytes(limit_bytes=15, peak_bytes=100, largest_bytes=10) == 15


def test_eviction_takes_what_backward_has_passed_then_what_it_needs_last() -> None:
    reloaded = [Candidate(turn=i, size_bytes=10) for i in (1, 2, 5, 8)]
    assert [c.turn for c in choose_evictions(reloaded, cursor=4, wanted_bytes=25)] == [8, 5, 1]
    assert choose_evictions(reloaded, cursor=4, wanted_bytes=0) == ()


def test_what_was_needed_first_has_the_highest_turn_and_what_nobody_needed_the_lowest() -> None:
    assert turns([3.0, 1.0, None, 2.0]) == (2, 0, 3, 1)
    assert turns([2.0, 2.0, 1.0]) == (0, 1, 2)  # at the same moment: against the order of saving


def test_a_plan_that_spills_nothing_looks_at_the_drive_again_now_and_then() -> None:
    planner = Planner(None)
    lifetime = Lifetime(
        index=0,
        size_bytes=100,
        dtype="float32",
        module="m",
        saved_s=0.0,
        needed_s=1.0,
        released_s=1.0,
        path=Way.KEPT,
        waited_s=0.0,
    )
    seen = PassProfile(
        number=0,
        forward_s=1.0,
        total_s=3.0,
        saved_bytes=100,
        spilled_bytes=0,
        peak_bytes=100,
        save_stall_s=0.0,
        need_stall_s=0.0,
        lifetimes=(lifetime,),
        timeline=(),
    )
    probes = []
    for _ in range(2 * PROBE_EVERY_PASSES):
        planner.pass_ended(seen, device_bytes_per_s=1.0)  # far too slow
        probes.append(planner.spills(0))
        assert not planner.spills(1)
    assert probes.count(True) == 2
