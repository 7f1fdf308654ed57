"""What the ends of simulated nodes come to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastrain.launcher import rundir
from elastrain.launcher.rundir import RunDir
from elastrain.launcher.simulated_ends import EndsOfNodes


def _ends(run: RunDir, *nodes: tuple[int, bool]) -> EndsOfNodes:
    ends = EndsOfNodes()
    for number, (code, job_is_over) in enumerate(nodes):
        folder = rundir.of_node(run, f"node{number}").path
        folder.mkdir(parents=True, exist_ok=True)
        end = {"sentence": "it ended", "detail": "", "job_is_over": job_is_over}
        (folder / "run.json").write_text(json.dumps({"end": end}))
        ends.add(code, f"node{number}", run)
    return ends


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ([(0, True), (0, True)], 0),
        ([(143, False), (0, True), (0, True)], 0),
        ([(143, False), (1, False), (0, True)], 1),
        ([(143, False), (1, True)], 1),
        ([(143, False), (143, False)], 143),
    ],
)
def test_a_node_that_was_told_to_go_does_not_count_where_others_have_ended_the_job(
    tmp_path: Path, nodes: list[tuple[int, bool]], code: int
) -> None:
    assert _ends(RunDir(path=tmp_path), *nodes).code() == code
