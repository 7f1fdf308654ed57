"""A bit flips in a backup that becomes the primary, or in a frame between nodes: the job keeps its bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import assert_equal_to_undisturbed, run_job

pytestmark = [pytest.mark.slow, pytest.mark.on_demand]


def test_a_backup_with_a_flipped_state_does_not_pass_it_on_as_primary(tmp_path: Path) -> None:
    arguments = ("--steps", "20", "--backups", "2")
    faults = [
        "flip --target member:m1 --at step=8,phase=forward --where backup",
        "kill --target member:m2 --at step=8,phase=backward",  # of the shard that m1 keeps the flipped state of
    ]
    run = run_job(tmp_path, workers=3, arguments=arguments, faults=faults)
    assert_equal_to_undisturbed(run, *arguments)
    struck = {(e["member"], e["kind"]) for journal in run.journals.values() for e in journal if e["event"] == "fault"}
    assert struck == {("m1", "flip"), ("m2", "kill")}


def test_a_flipped_frame_between_nodes_ends_a_link_and_changes_nothing(tmp_path: Path) -> None:
    arguments = ("--steps", "20", "--backups", "1")
    faults = ["flip --target member:m1 --at step=8,phase=reduce --where frame"]
    options = ("--local-nodes", "3")
    run = run_job(tmp_path, workers=1, arguments=arguments, faults=faults, options=options)
    assert_equal_to_undisturbed(run, *arguments)
    lost = [e["reason"] for journal in run.journals.values() for e in journal if e["event"] == "lost"]
    assert any("altered" in reason or "broke the protocol" in reason for reason in lost), lost
