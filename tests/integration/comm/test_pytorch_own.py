"""PyTorch's own tests of torch.distributed on this backend: nothing fails that a CPU backend can be asked for."""

from __future__ import annotations

import pytest

from experiments.pytorch_tests.run import QUICK, Outcome, run


def test_a_selection_passes_in_the_place_of_gloo_and_a_failure_is_seen() -> None:
    fails = "test_sparse_all_reduce_sum"
    outcome = run("gloo", (*QUICK, fails))
    assert not outcome.failed, "\n".join(outcome.failed.values())
    assert len(outcome.passed) >= 20, outcome
    assert outcome.beside == {fails: "sparse tensors are not offered"}


@pytest.mark.on_demand
@pytest.mark.timeout(1500)
@pytest.mark.parametrize(("way", "at_least"), [("own", 60), ("gloo", 75)])
def test_all_of_them(way: str, at_least: int) -> None:
    outcome: Outcome = run(way)
    assert not outcome.failed, "\n".join(outcome.failed.values())
    assert len(outcome.passed) >= at_least, outcome.counts()
