"""Real nodes: the second loss may come two steps after the first, and a primary goes together with a backup."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nodes_harness import NodesJob
from tests.support.training import assert_equal_to_undisturbed

pytestmark = pytest.mark.slow
STEPS = ("--steps", "20")


def test_a_node_is_lost_two_steps_after_another_one_and_the_third_has_everything(tmp_path: Path) -> None:
    """Steps 6 and 7 are committed without node0; each shard that it held has two holders again when node1 goes."""
    arguments = (*STEPS, "--backups", "1")
    faults = tmp_path / "faults"
    faults.write_text(
        "kill --target node:node0 --at step=6,phase=backward\nkill --target node:node1 --at step=8,phase=backward\n"
    )
    options = ("--local-nodes", "3", "--max-restarts", "0", "--faults", str(faults))
    with NodesJob(tmp_path, *options, arguments=arguments) as job:
        run = job.finish()
        assert_equal_to_undisturbed(run, *arguments)
        assert list(run.digests) == ["m2"]
        windows = [e for e in run.journals["m2"] if e["event"] == "window"]
        opened = [e["step"] for e in windows if e["short"]]
        closed = [e["step"] for e in windows if not e["short"]]
        assert opened[0] == 6
        assert closed[0] <= 8
        assert job.events("window", source="agent:node2", window="closed")[0]["after_steps"] <= 2
        job.assert_nothing_left()


def test_with_two_backups_a_primary_and_a_backup_go_together(tmp_path: Path) -> None:
    """Two of four nodes: most shards of the one have a backup on the other."""
    arguments = (*STEPS, "--backups", "2")
    faults = tmp_path / "faults"
    faults.write_text(
        "kill --target node:node1 --at step=6,phase=backward\nkill --target node:node2 --at step=6,phase=backward\n"
    )
    options = ("--local-nodes", "4", "--max-restarts", "0", "--faults", str(faults))
    with NodesJob(tmp_path, *options, arguments=arguments) as job:
        run = job.finish()
        assert_equal_to_undisturbed(run, *arguments)
        assert sorted(run.digests) == ["m0", "m3"]
        job.assert_nothing_left()
