"""For any sizes: each sample exactly once per data epoch, and fingerprints that prove it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from elastrain.base.arithmetic import mix
from elastrain.job.batch import DataOrder, permuted, sample_fingerprint


@settings(max_examples=2 * settings().max_examples, deadline=None, derandomize=True)
@given(size=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_a_permutation_sends_each_index_somewhere_else(size: int, key: int) -> None:
    assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


@st.composite
def orders(draw: st.DrawFn) -> DataOrder:
    micro = draw(st.integers(1, 5))
    return DataOrder(
        dataset_size=draw(st.integers(1, 60)),
        global_batch_size=micro * draw(st.integers(1, 6)),
        micro_batch_size=micro,
        seed=draw(st.integers()),
        shuffle=draw(st.booleans()),
    )


@settings(max_examples=3 * settings().max_examples // 2, deadline=None, derandomize=True)
@given(order=orders(), steps=st.integers(1, 12))
def test_each_sample_is_used_once_per_data_epoch_whatever_the_remainder(order: DataOrder, steps: int) -> None:
    used = Counter(s for step in range(steps) for m in range(order.micro_batches) for s in order.samples(step, m))
    whole_epochs, rest = divmod(steps * order.global_batch_size, order.dataset_size)
    assert set(used.values()) == {1}
    per_epoch = Counter(epoch for epoch, _ in used)
    assert all(per_epoch[epoch] == order.dataset_size for epoch in range(whole_epochs))
    assert per_epoch[whole_epochs] == rest


@settings(max_examples=3 * settings().max_examples // 2, deadline=None, derandomize=True)
@given(order=orders(), steps=st.integers(1, 12), lost=st.integers(0, 10**6))
def test_the_sum_of_fingerprints_tells_a_lost_or_doubled_micro_batch(order: DataOrder, steps: int, lost: int) -> None:
    prints = [order.fingerprint(step, m) for step in range(steps) for m in range(order.micro_batches)]
    expected = sum(
        sample_fingerprint(*divmod(position, order.dataset_size)) for position in range(steps * order.global_batch_size)
    )
    if not order.shuffle or steps * order.global_batch_size % order.dataset_size == 0:
        assert sum(prints) % 2**64 == expected % 2**64
    index = lost % len(prints)
    total = sum(prints) % 2**64
    assert (total - prints[index]) % 2**64 != total
    assert (total + prints[index]) % 2**64 != total


@given(a=st.integers(0, 2**64 - 1), b=st.integers(0, 2**64 - 1))
def test_mixing_is_one_to_one(a: int, b: int) -> None:
    assert (mix(a) == mix(b)) == (a == b)
