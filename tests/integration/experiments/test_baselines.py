"""The peers that elastrain is compared with, as real processes: same work, and the memory their settings promise."""

from __future__ import annotations

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from experiments.baselines import ddp, plain, zero1
from experiments.baselines.workload import Barrier, Measurement, Place, Workload, run_members
from experiments.train_gpt.model import build, parameter_count

WORK = Workload(micro_batch_size=1, micro_batches=2, steps=1, warmup_steps=1)
MODEL_BYTES = 4 * parameter_count(build("tiny", seed=0))
SLACK_BYTES = 100_000


def test_peers_see_the_same_samples_and_hold_what_their_settings_say() -> None:
    alone = plain.run(WORK, 1)
    replicated = ddp.run(WORK, 2)
    sharded = zero1.run(WORK, 2)
    assert [len(found) for found in (alone, replicated, sharded)] == [1, 2, 2]
    first_losses = [sum(one.losses[0] for one in found) / len(found) for found in (alone, replicated, sharded)]
    assert first_losses == pytest.approx([first_losses[0]] * 3, rel=0.02), "apart by their dropout masks only"
    resting = [found[0].resting_bytes for found in (alone, replicated)]
    assert resting == pytest.approx([4 * MODEL_BYTES] * 2, abs=SLACK_BYTES), "parameters, gradients, two moments"
    both_bytes = sum(one.resting_bytes or 0 for one in sharded)
    assert both_bytes == pytest.approx(6 * MODEL_BYTES, abs=2 * SLACK_BYTES), "the moments once among both members"
    for found in (alone, replicated, sharded):
        for one in found:
            assert one.peak_bytes is not None and one.resting_bytes is not None
            assert one.peak_bytes > one.resting_bytes


def _second_member_fails(work: Workload, place: Place, start: Barrier) -> Measurement:
    if place.rank == 1:
        raise OSError("no such luck")
    start.wait()
    raise AssertionError("the first member waits for the second and is ended")


def test_a_failing_member_ends_the_run_with_its_traceback() -> None:
    with pytest.raises(ProcessRaisedException, match="no such luck"):
        run_members(WORK, _second_member_fails, members=2, timeout_s=60)
