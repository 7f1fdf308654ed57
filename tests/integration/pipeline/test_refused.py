"""What pipelines refuse, over real processes on one node and on two: one sentence, at once, on every node."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.training import SCRIPTS, run_job

SCRIPT = SCRIPTS / "refused_pipeline.py"
SOON_S = 60.0
"""On a loaded machine, starts included; who waits for somebody that is gone waits for 120 s and more."""

pytestmark = pytest.mark.slow

REFUSED = {
    "wish": "and init(stages=5) ask for different pipelines",
    "losses": "and no cut of this model is legal",
    "skip": "and no cut of this model is legal",
    "more": "asks for 3 cuts, and this model has 2 legal: before 'layers.0', before 'layers.1'",
    "parameter": "parameter 'scale' lies outside of blocks and is used behind block 'out'",
    "values": "aten._local_scalar_dense.default looks at values that are not on this member",
    "cache": "is handed a cache (Cache) that keeps its activations for later blocks",
    "graph": "members have traced different block graphs in step 0",
    "compiled": "the whole model is compiled, and a pipeline needs the code between its blocks",
    "item": "read step.loss once the step is committed",
    "outside": "is not on this member, and was called outside of a step",
    "state": "state_dict() needs all parameters, and this member of a pipeline does not have block",
}
USUAL = {("compiled", False), ("item", False), ("state", False), ("graph", True), ("outside", True), ("values", True)}
EACH = [(case, on_nodes) for on_nodes in (False, True) for case in REFUSED]


@pytest.mark.parametrize(
    ("case", "on_nodes"),
    [each if each in USUAL else pytest.param(*each, marks=pytest.mark.on_demand) for each in EACH],
)
def test_it_is_one_sentence_at_once(tmp_path: Path, case: str, on_nodes: bool) -> None:
    stages = 4 if case == "more" else 2
    many = ("--local-nodes", str(stages)) if on_nodes else ()
    options = (*many, "--stages", str(stages), "--max-restarts", "0")
    began_s = time.monotonic()
    workers = 1 if on_nodes else stages
    run = run_job(tmp_path, workers=workers, script=SCRIPT, arguments=("--case", case), options=options)
    assert run.exit_code == 1, run.output
    assert REFUSED[case] in run.output
    assert "Traceback" not in run.output
    assert time.monotonic() - began_s < SOON_S
