"""What a soak draws, and when something has grown."""

from __future__ import annotations

from itertools import islice

import pytest

from elastrain.launcher.faults.table import CLASSES
from experiments.faults.cells import Aim, Answer, Ground
from experiments.soak.drawing import AT_ONCE, faults, ways
from experiments.soak.figures import GROWTH, Sample, figures, growth


def sample(at_s: float, lasting_bytes: int = 100) -> Sample:
    return Sample(at_s=at_s, lasting_bytes=lasting_bytes, lasting_descriptors=50, worker_bytes=1000, disk_bytes=0)


def test_a_seed_draws_the_same_mixed_faults() -> None:
    first, again, other = (list(islice(faults(seed, 8.0), 400)) for seed in (1, 1, 2))
    assert first == again != other
    assert {drawn.way.kind for drawn in first} >= {"kill", "hang", "stop", "etcd-kill", "preempt"}
    assert sum(drawn.wait_s for drawn in first) == pytest.approx(400 * 8.0, rel=0.2)


def test_only_what_a_job_of_several_nodes_survives_is_drawn_in_a_phase_where_it_can_strike() -> None:
    assert all(way.answer is Answer.GOES_ON and way.ground is not Ground.NETNS for way in ways())
    assert not {Aim.ALL, Aim.TWO} & {way.aim for way in ways()}
    for drawn in islice(faults(3, 8.0), 300):
        assert drawn.phase in CLASSES[drawn.way.kind].phases or (drawn.phase == "" and drawn.way.kind in AT_ONCE)


def test_growth_is_the_last_quarter_over_the_second() -> None:
    assert growth([9, 9, 1, 1, 1, 1, 2, 2]) == pytest.approx(2.0)
    assert growth([1, 2, 3]) is None


def test_what_grows_is_counted() -> None:
    flat = [sample(at_s) for at_s in range(16)]
    assert figures(flat)["grown"] == 0
    rising = [sample(at_s, lasting_bytes=int(100 * (1 + at_s / 10))) for at_s in range(16)]
    found = figures(rising)
    assert found["grown"] == 1
    assert found["growth_lasting_bytes"] > GROWTH
