"""What do snapshots and checkpoints cost, and what do they catch?

`python -m experiments.snapshot.run [--quick]`. What files cost and catch (`files`, without a job), and whether jobs
that are killed whole come back with the same bits (`resumed`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.snapshot import files, resumed

REACHES = {
    "restore_fraction": Reach(limit=0.6, at_least=True),
    "file_flips_missed": Reach(limit=0),
    "resume_digest_equal": Reach(limit=1, at_least=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="≤ 90 s on 2 quiet cores")
    parser.add_argument("--folder", type=Path, default=ROOT, help="where to write: on the drive that is measured")
    add_record_flag(parser)
    args = parser.parse_args()
    settings = {"layers": 20, "rounds": 3 if args.quick else 9, "flips": 100 if args.quick else 1000}
    with tempfile.TemporaryDirectory(prefix=".elastrain-snapshot-", dir=args.folder) as name:
        found = files.figures(Path(name), **settings)
        found |= resumed.figures(Path(name), rounds=1 if args.quick else 8, kills=1 if args.quick else 3)
    if args.record:
        record("snapshot", found, quick=args.quick, settings=settings)
    met = report(found, REACHES)
    return 0 if met or args.quick else 1


if __name__ == "__main__":
    sys.exit(main())
