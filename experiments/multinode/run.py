"""Hosts without an etcd of anybody's: what does the loss of a host cost that runs a part of the job's own etcd?

`python -m experiments.multinode.run [--quick] [--kills N] [--record]`. The README has the keys.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from experiments.multinode.quorum import measured

REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "first_host_stall_s": Reach(limit=5),
    "first_host_join_s": Reach(limit=15),
    "views_lost": Reach(limit=0),
    "worst_view_s": Reach(limit=5),
    "leftovers": Reach(limit=0),
}


def main() -> int:
    """Run the experiment, and print its figures. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.multinode.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--kills", type=int, default=20, help="etcd members that are killed in turn")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    settings = {"steps": 200 if args.quick else 600, "kills": args.kills}
    with tempfile.TemporaryDirectory(prefix="multinode-") as folder:
        figures = measured(Path(folder), **settings)
    if args.record:
        record("multinode", figures, quick=args.quick, settings=settings)
    return 0 if report(figures, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
