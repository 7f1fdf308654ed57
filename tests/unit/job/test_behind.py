"""Data that goes on behind the steps of an earlier job."""

from __future__ import annotations

from dataclasses import replace

from elastrain.job.batch import DataOrder


def test_a_job_goes_on_behind_the_samples_of_an_earlier_one() -> None:
    whole = DataOrder(dataset_size=10, global_batch_size=4, micro_batch_size=2, seed=3)
    later = replace(whole, behind=7)
    assert [later.samples(s, m) for s in range(5) for m in range(2)] == [
        whole.samples(s, m) for s in range(7, 12) for m in range(2)
    ]
    assert [later.epoch(s) for s in range(5)] == [whole.epoch(s) for s in range(7, 12)]
    assert later.described()["steps of an earlier job"] == 7 and "steps of an earlier job" not in whole.described()
