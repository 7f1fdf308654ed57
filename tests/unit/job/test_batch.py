"""Which sample is in which micro-batch, for small examples."""

from __future__ import annotations

from typing import Any

import pytest

from elastrain.base.arithmetic import mix
from elastrain.errors import ConfigError
from elastrain.job.batch import DataOrder, permuted


def _order(**fields: Any) -> DataOrder:
    return DataOrder(**{"dataset_size": 10, "global_batch_size": 4, "micro_batch_size": 2, "seed": 1, **fields})


def test_without_shuffling_samples_follow_each_other_across_data_epochs() -> None:
    order = _order(shuffle=False)
    taken = [order.samples(step, m) for step in range(3) for m in range(order.micro_batches)]
    assert [sample for pair in taken for _, sample in pair] == [*range(10), 0, 1]
    assert [epoch for pair in taken for epoch, _ in pair] == [0] * 10 + [1] * 2


def test_positions_are_consecutive() -> None:
    order = _order()
    assert order.micro_batches == 2
    assert [order.positions(s, m) for s in (0, 1) for m in (0, 1)] == [
        range(2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]


def test_the_order_is_fixed_for_ever() -> None:
    assert [sample for m in range(2) for _, sample in _order().samples(7, m)] == [3, 9, 9, 2]
    assert _order().fingerprint(0, 0) == 8120400558469085352
    assert mix(0) == 0xE220A8397B1DCDAF, "splitmix64's first output from seed 0"


def test_data_epochs_and_seeds_have_orders_of_their_own() -> None:
    def epoch(order: DataOrder, number: int) -> list[int]:
        return [order.samples(number, m)[0][1] for m in range(50)]

    order = _order(dataset_size=50, global_batch_size=50, micro_batch_size=1)
    other = _order(dataset_size=50, global_batch_size=50, micro_batch_size=1, seed=2)
    orders = [epoch(order, 0), epoch(order, 1), epoch(other, 0), list(range(50))]
    assert len({tuple(o) for o in orders}) == 4
    assert all(sorted(o) == list(range(50)) for o in orders)


def test_a_global_batch_may_be_larger_than_the_dataset() -> None:
    order = _order(dataset_size=3, global_batch_size=8, micro_batch_size=8)
    assert [epoch for epoch, _ in order.samples(0, 0)] == [0, 0, 0, 1, 1, 1, 2, 2]


def test_one_sample_is_a_dataset() -> None:
    assert _order(dataset_size=1).samples(0, 0) == ((0, 0), (1, 0))


def test_a_permutation_is_computed_without_holding_it() -> None:
    assert 0 <= permuted(10**17, 10**18, key=3) < 10**18


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"micro_batch_size": 3}, "global_batch_size=4 is not a multiple of micro_batch_size=3"),
        ({"dataset_size": 0}, "dataset_size must be a whole number of at least 1; got 0"),
        ({"global_batch_size": -4}, "global_batch_size"),
        ({"micro_batch_size": 2.0}, "micro_batch_size"),
        ({"micro_batch_size": True}, "micro_batch_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        _order(**fields)


@pytest.mark.parametrize(("step", "micro_batch"), [(0, 2), (0, -1), (-1, 0)])
def test_micro_batches_that_do_not_exist_are_refused(step: int, micro_batch: int) -> None:
    with pytest.raises(ValueError, match="no micro-batch"):
        _order().positions(step, micro_batch)


def test_an_epoch_that_ends_inside_a_step_counts_by_the_first_sample_of_each_step() -> None:
    order = _order(dataset_size=10, global_batch_size=4)
    assert order.steps_per_epoch == 3
    assert [order.epoch(step) for step in range(7)] == [order.samples(step, 0)[0][0] for step in range(7)]
    assert [order.epoch(step) for step in range(7)] == [0, 0, 0, 1, 1, 2, 2]
    assert _order(dataset_size=8, global_batch_size=4).steps_per_epoch == 2
    assert _order(dataset_size=3, global_batch_size=8, micro_batch_size=4).steps_per_epoch == 1
