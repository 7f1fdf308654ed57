"""Do models that we did not write come out, after kills, as if nothing had happened? See README.md.

`python -m experiments.strangers.run [--only KIND …] [--nodes 3] [--record]`. Needs `pip install transformers`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish
from experiments.strangers.models import MODELS

STEPS = 60
TIMEOUT_S = 300.0
SCRIPT = ROOT / "experiments" / "strangers" / "train.py"
# Far enough apart that a replacement, which imports transformers first, is there before the next loss.
FAULTS = ("member:random --at step=7,phase=backward", "member:random --at step=40,phase=reduce")
NODE_FAULTS = ("member:random --at step=7,phase=forward", "node:node2 --at step=40,phase=backward")
REACHES = {"digest_mismatches": Reach(limit=0), "failed_jobs": Reach(limit=0)}


def lines_of(output: str) -> set[str]:
    """What members have printed of their steps: one line per step if they agree."""
    return {line for line in output.splitlines() if line.startswith("step ")}


def verdict(kind: str, folder: Path, nodes: int | None) -> str:
    """`equal`, `differs`, or the end of the output of a job that failed."""
    script = Script(path=SCRIPT, args=(kind, str(STEPS)))
    with alone(folder / "alone", script) as process:
        right = lines_of(finish(process, folder / "alone", timeout_s=TIMEOUT_S))
    faults = folder / "faults.txt"
    faults.write_text("".join(f"kill --target {fault}\n" for fault in (NODE_FAULTS if nodes else FAULTS)))
    options = ["--faults", str(faults)] if nodes else ["--standalone", "--faults", str(faults)]
    try:
        with elastic(folder / "job", script, members=3, nodes=nodes, options=options) as process:
            found = lines_of(finish(process, folder / "job", timeout_s=TIMEOUT_S))
    except RuntimeError as error:
        return str(error)
    return "equal" if found == right else "differs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=list(MODELS), help="these models")
    parser.add_argument("--nodes", type=int, choices=(3,), help="three simulated nodes instead of one")
    add_record_flag(parser)
    args = parser.parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-strangers-") as name:
        for kind in args.only:
            found[kind] = verdict(kind, Path(name) / kind, args.nodes)
            print(f"{kind:<12} {found[kind]}", flush=True)
    values: dict[str, Any] = {
        "models": len(found),
        "digest_mismatches": sum(each == "differs" for each in found.values()),
        "failed_jobs": sum(each not in ("equal", "differs") for each in found.values()),
        "not_equal": sorted(kind for kind, each in found.items() if each != "equal"),
    }
    if args.record:
        record("strangers", values, quick=False, settings={"steps": STEPS, "nodes": args.nodes, "only": args.only})
    return 0 if report(values, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
