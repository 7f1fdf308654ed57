"""How much of PyTorch's own test of torch.distributed passes on the backend "elastrain"?

`python -m experiments.pytorch_tests.run [--quick] [--json]`. Counts and reasons; `suite` runs the tests.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from experiments.harness import ROOT, Reach, add_record_flag, record, report

REACHES = {"failed": Reach(limit=0)}
QUICK = (
    "test_DistributedDataParallelCPU_grad_is_view",
    "test_DistributedDataParallel_requires_grad",
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_with_empty",
    "test_all_gather_complex",
    "test_all_gather_object_subgroup",
    "test_all_reduce_coalesced_full_group_max",
    "test_all_reduce_complex_unsupported_ops",
    "test_all_reduce_full_group_product",
    "test_all_reduce_sum_async",
    "test_batch_isend_irecv_gloo_tags",
    "test_broadcast_full_group",
    "test_ddp_create_graph",
    "test_destroy_group",
    "test_gather_checks",
    "test_gather_object_subgroup",
    "test_get_future",
    "test_get_rank_size_group",
    "test_irecv",
    "test_new_subgroups_with_group_param",
    "test_reduce_full_group_min",
    "test_reduce_sum_twice",
    "test_scatter_complex",
    "test_scatter_object_list",
    "test_send_recv_any_source",
    "test_send_recv_with_tag",
    "test_static_graph_api_cpu",
)
# Failures that say nothing about this backend: by beginnings of names, why.
BESIDE_THE_POINT = {
    "gloo": {
        "test_monitored_barrier_gloo": "asks for Gloo's own; elastrain.comm.monitored_barrier is ours",
        "test_barrier_timeout": "asks for the words of Gloo's timeout",
        "test_ddp_logging_data_cpu": "asks DDP's log for the name gloo",
        "test_sparse_all_reduce_sum": "sparse tensors are not offered",
    },
    "own": {},
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """By name; `skipped`, `failed` and `beside` (failures beside the point) with the reason."""

    passed: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]
    beside: dict[str, str]

    def counts(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in ("passed", "skipped", "failed", "beside")}

    def reasons(self) -> dict[str, int]:
        """How many tests skipped for which reason; the most frequent first."""
        return dict(collections.Counter(self.skipped.values()).most_common())


def run(way: str, names: tuple[str, ...] = ()) -> Outcome:
    """Run these tests, or all. Raises CalledProcessError when the suite itself breaks."""
    command = [sys.executable, "-m", "experiments.pytorch_tests.suite", way, *names]
    with tempfile.TemporaryDirectory(prefix="pytorch-tests-") as folder:  # the tests leave files behind
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=1200,
        )
    said: dict[str, Any] = json.loads(done.stdout.decode().splitlines()[-1])
    reasons = {
        name: reason
        for name in said["failed"]
        for start, reason in BESIDE_THE_POINT[way].items()
        if name.startswith(start)
    }
    failed = {name: text for name, text in said["failed"].items() if name not in reasons}
    return Outcome(passed=said["passed"], skipped=said["skipped"], failed=failed, beside=reasons)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a selection instead of all (≤ 90 s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON only")
    add_record_flag(parser)
    args = parser.parse_args()
    figures: dict[str, Any] = {"failed": 0}
    for way in ("own", "gloo"):
        outcome = run(way, QUICK if args.quick else ())
        figures["failed"] += len(outcome.failed)
        figures |= {f"{way}_{name}": count for name, count in outcome.counts().items()}
        figures |= {f"{way}_skip_reasons": outcome.reasons(), f"{way}_beside_reasons": outcome.beside}
        figures |= {f"{way}_failures": outcome.failed}
    if args.record:
        record("pytorch_tests", figures, quick=args.quick, settings={"world": 4})
    if args.json:
        print(json.dumps(figures))
        return 0
    return 0 if report(figures, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
