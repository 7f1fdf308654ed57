"""Runs a job of stub workers that has checkpoints: RUN_DIR CHECKPOINT_DIR NODES WORKERS STUB_ARGS…"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from elastrain.launcher.run_options import JobSize, OutputPlan, RunOptions
from elastrain.launcher.simulated import run_local_nodes
from elastrain.launcher.starting import report, run_alone
from elastrain.launcher.worker_start import Script
from tests.support.launcher_harness import STUB


def main(run_dir: str, checkpoint_dir: str, nodes: str, workers: str, *stub_args: str) -> int:
    options = RunOptions(
        job=f"lives-{Path(run_dir).parent.name}",
        script=Script.of(str(STUB), stub_args),
        target=str(STUB),
        size=JobSize(workers=int(workers), nodes_min=int(nodes), nodes_max=int(nodes)),
        output=OutputPlan(run_dir=Path(run_dir)),
        checkpoint_dir=Path(checkpoint_dir),
        began_s=time.monotonic(),
    )
    return report(run_alone(options)) if int(nodes) == 1 else run_local_nodes(options, netns=False)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
