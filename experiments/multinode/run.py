"""Hosts without an etcd of anybody's: what does the loss of a host cost that runs a part of the job's own etcd?

`python -m experiments.multinode.run [--quick] [--part PART] [--kills N] [--record]`. The README has the keys.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from experiments.harness import Reach, add_record_flag, record, report
from experiments.jobs import unwind_on_sigterm
from experiments.multinode import quorum, rivals, spare

REACHES = {
    "digest_equal": Reach(limit=1, at_least=True),
    "spare_takeover_s": Reach(limit=10),
    "first_host_stall_s": Reach(limit=5),
    "first_host_join_s": Reach(limit=15),
    "views_lost": Reach(limit=0),
    "worst_view_s": Reach(limit=5),
    "leftovers": Reach(limit=0),
}
PARTS = ("quorum", "spare", "rivals")


def measured(folder: Path, parts: Collection[str], *, steps: int, kills: int) -> dict[str, Any]:
    """The figures of these parts. A digest or a leftover of one part counts for all."""
    found: dict[str, Any] = {}
    if "quorum" in parts:
        found |= quorum.measured(_made(folder / "quorum"), steps=steps, kills=kills)
    if "spare" in parts:
        found |= spare.measured(_made(folder / "spare"), steps=steps // 2)
    if "rivals" in parts:
        found |= rivals.measured(_made(folder / "rivals"))
    equal = [found[key] for key in ("digest_equal", "spare_digest_equal") if key in found]
    left = [found[key] for key in ("leftovers", "spare_leftovers") if key in found]
    return found | ({"digest_equal": all(equal), "leftovers": sum(left)} if equal else {})


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> int:
    """Run the experiment, and print its figures. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m experiments.multinode.run", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this part alone; may be repeated")
    parser.add_argument("--kills", type=int, default=20, help="etcd members that are killed in turn")
    add_record_flag(parser)
    args = parser.parse_args()
    unwind_on_sigterm()
    settings = {"steps": 200 if args.quick else 600, "kills": args.kills}
    with tempfile.TemporaryDirectory(prefix="multinode-") as folder:
        figures = measured(Path(folder), args.part or PARTS, **settings)
    if args.record:
        record("multinode", figures, quick=args.quick, settings=settings)
    return (
        0 if report(figures, {key: reach for key, reach in REACHES.items() if not args.part or key in figures}) else 1
    )


if __name__ == "__main__":
    sys.exit(main())
