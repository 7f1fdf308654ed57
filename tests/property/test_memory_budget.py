"""A room never promises more than the limit, and says exactly what is missing."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastrain.job.fold import Fold, absorb
from elastrain.job.placement import Holders
from elastrain.memory.held_shards import choose_shards, held_by
from elastrain.memory.memory_budget import (
    Fit,
    Needs,
    Outside,
    Shortfall,
    fit_plan,
    slots_needed,
)

DISK = Outside(bytes_per_s=1e9)
sizes = st.integers(0, 1 << 34)


@st.composite
def needs(draw: st.DrawFn) -> Needs:
    shards, activations = draw(sizes), draw(sizes)
    return Needs(
        base_bytes=draw(sizes),
        parameters_bytes=draw(sizes),
        gradients_bytes=draw(sizes),
        shards_bytes=shards,
        shards_least_bytes=draw(st.integers(0, shards)),
        activations_bytes=activations,
        activations_least_bytes=draw(st.integers(0, activations)),
        check_bytes=draw(sizes),
        shards_at_check_bytes=draw(st.integers(0, shards)),
    )


@given(limit=st.integers(1, 1 << 36), needs=needs(), has_disk=st.booleans())
def test_what_stays_fits_into_the_limit_and_nothing_leaves_without_need(
    limit: int, needs: Needs, has_disk: bool
) -> None:
    found = fit_plan(limit, needs, outside=DISK if has_disk else None)
    if isinstance(found, Shortfall):
        assert found.missing_bytes > 0
        assert isinstance(fit_plan(limit + found.missing_bytes, needs, outside=DISK if has_disk else None), Fit)
        less = fit_plan(limit + found.missing_bytes - 1, needs, outside=DISK if has_disk else None)
        assert isinstance(less, Shortfall)
        return
    kept_shards = needs.shards_bytes - found.shards_on_disk_bytes
    assert needs.fixed_bytes + needs.with_check(kept_shards) + found.activations_bytes <= limit
    assert found.activations_bytes >= needs.activations_least_bytes
    assert kept_shards >= needs.shards_least_bytes
    if found.shards_on_disk_bytes:
        assert found.activations_bytes == needs.activations_least_bytes
    if needs.total_bytes <= limit:
        assert found.activations_bytes >= needs.activations_bytes


@given(limit=st.integers(1, 1 << 36), needs=needs(), more=sizes)
def test_a_higher_limit_never_leaves_less_in_memory(limit: int, needs: Needs, more: int) -> None:
    small = fit_plan(limit, needs, outside=DISK)
    large = fit_plan(limit + more, needs, outside=DISK)
    if isinstance(small, Fit):
        assert isinstance(large, Fit)
        assert large.activations_bytes >= small.activations_bytes
        assert large.shards_on_disk_bytes <= small.shards_on_disk_bytes


@given(limit=st.integers(1, 1 << 36), needs=needs())
def test_a_bigger_need_never_makes_room(limit: int, needs: Needs) -> None:
    bigger = replace(needs, gradients_bytes=needs.gradients_bytes + 1)
    if isinstance(fit_plan(limit, needs, outside=DISK), Shortfall):
        assert isinstance(fit_plan(limit, bigger, outside=DISK), Shortfall)


@given(runs=st.integers(1, 40), data=st.data())
def test_the_slots_suffice_for_every_order_of_the_runs(runs: int, data: st.DataObject) -> None:
    todo = data.draw(st.lists(st.integers(0, runs - 1), unique=True))
    most = slots_needed(runs, [], todo)
    held: frozenset[tuple[int, int]] = frozenset()
    for run in todo:
        assert len(held) + 1 <= most
        held, _ = absorb(Fold(runs), held, (run, run + 1))
    assert most <= len(todo)


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 1 << 20)), max_size=30),
    st.integers(0, 1 << 26),
    st.floats(0, 3),
)
def test_enough_shards_leave_where_there_are_enough(
    shards: list[tuple[bool, int]], wanted: int, moments: float
) -> None:
    placement = tuple(Holders("a", ()) if mine else Holders("b", ("a",)) for mine, _ in shards)
    held = held_by("a", (placement,), [size for _, size in shards], moments=moments)
    chosen, _ = choose_shards(held, wanted)
    gone = [each.leaves_bytes for each in held if each.shard in chosen]
    assert sum(gone) >= min(wanted, sum(each.leaves_bytes for each in held))
    if gone:
        assert sum(gone) - max(gone) < wanted
