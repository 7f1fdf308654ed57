"""The kernel's peak of a whole process that trains within a limit, the steps before there is a plan included."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.lifetimes.figures import SMALL, peak_of_plain
from experiments.lifetimes.worker import Case, Worker
from experiments.offload.processes import Process

STEPS = 6


@pytest.mark.on_demand
@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
@pytest.mark.parametrize("kind", ["gpt", "bert", "t5"])
def test_the_peak_is_not_above_the_limit(kind: str, share: float, tmp_path: Path) -> None:
    limit_bytes = int(share * peak_of_plain(kind, SMALL, tmp_path))
    process = Process(Worker, Case(way="ours", kind=kind, shape=SMALL, directory=tmp_path, limit_bytes=limit_bytes))
    for _ in range(STEPS):
        process.ask("step")
    peak_bytes = process.ask("peak_bytes")
    process.close()
    assert peak_bytes <= limit_bytes
