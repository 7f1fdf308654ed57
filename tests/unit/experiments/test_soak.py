"""What a soak hears of its faults, and when something has grown."""

from __future__ import annotations

import json

import pytest

from elastrain.launcher.faults.random_faults import ChaosPlan
from experiments.faults.cells import WAYS, Answer, Ground
from experiments.soak.figures import GROWTH, Sample, figures, growth
from experiments.soak.striking import CLASSES as STRUCK
from experiments.soak.striking import HEARD_WITHIN_S, Strikes


def sample(at_s: float, lasting_bytes: int = 100) -> Sample:
    return Sample(at_s=at_s, lasting_bytes=lasting_bytes, lasting_descriptors=50, worker_bytes=1000, disk_bytes=0)


def test_what_the_command_says_is_read_line_by_line() -> None:
    strikes = Strikes()
    for number, (line, struck) in enumerate(
        [
            ("kill --target member:m1 --at phase=commit,t=3.5", True),
            ("flip --target member:m2 --at t=9 --where taken --bit 20", True),
            ("kill --target node:node0 --at t=11", False),
            ("flip --target member:m2 --at t=30 --where taken --bit 20", True),
        ]
    ):
        said = {"number": number, "line": line, "struck": struck, "sentence": f"{line}: it does not strike"}
        strikes.take(json.dumps(said), at_s=100.0 + number)
    strikes.take(json.dumps({"number": 4, "line": None, "struck": False, "sentence": "hang finds nobody"}), at_s=105.0)
    strikes.take(json.dumps({"seed": 1, "drawn": 5, "struck": 3}), at_s=106.0)
    assert strikes.by_class() == {"flip": 2, "kill": 1}
    assert strikes.by_refusal() == {"it does not strike": 1, "hang finds nobody": 1}
    assert strikes.flipped_s == {"m2": 101.0 - HEARD_WITHIN_S}


def test_what_is_struck_is_all_that_every_job_of_several_nodes_survives() -> None:
    """Those ways of the cells after which a job goes on; drives and networks of their own need other jobs.

    Most wrong replacements cost the job a place, and which one is drawn is chance.
    """
    grounds = (Ground.HOST, Ground.NODES)
    plan = ChaosPlan(seed=0, mean_s=6.0, classes=tuple(STRUCK.split(",")))
    survived = {way.kind for way in WAYS if way.answer is Answer.GOES_ON and way.ground in grounds}
    assert set(plan.classes) == survived - {"wrong-replacement"}


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
