"""Do models that we did not write come out, after kills, as if nothing had happened? See README.md.

`python -m experiments.strangers.run [--only KIND …] [--nodes 3] [--stages N] [--lose-all N] [--record]`. Needs
`pip install transformers`.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.harness import ROOT, Reach, add_record_flag, record, report
from experiments.jobs import Script, alone, elastic, finish
from experiments.strangers.models import MODELS

STEPS = 60
TIMEOUT_S = 900.0
SCRIPT = ROOT / "experiments" / "strangers" / "train.py"
# Far enough apart that a replacement, which imports transformers first, is there before the next loss.
FAULTS = ("member:random --at step=7,phase=backward", "member:random --at step=40,phase=reduce")
NODE_FAULTS = ("member:random --at step=7,phase=forward", "node:node2 --at step=40,phase=backward")
REACHES = {"digest_mismatches": Reach(limit=0), "failed_jobs": Reach(limit=0)}


def lines_of(output: str) -> set[str]:
    """What members have printed of their steps: one line per step if they agree."""
    return {line for line in output.splitlines() if line.startswith("step ")}


def verdict(kind: str, folder: Path, *, nodes: int | None, stages: int) -> str:
    """`equal`, `differs`, or the end of the output of a job that failed."""
    script = Script(path=SCRIPT, args=(kind, str(STEPS), *(["end"] if stages > 1 else [])))
    with alone(folder / "alone", script) as process:
        right = lines_of(finish(process, folder / "alone", timeout_s=TIMEOUT_S))
    faults = folder / "faults.txt"
    faults.write_text("".join(f"kill --target {fault}\n" for fault in (NODE_FAULTS if nodes else FAULTS)))
    options = ["--faults", str(faults), "--stages", str(stages), *([] if nodes else ["--standalone"])]
    try:
        with elastic(folder / "job", script, members=3, nodes=nodes, options=options) as process:
            found = lines_of(finish(process, folder / "job", timeout_s=TIMEOUT_S))
    except RuntimeError as error:
        return str(error)
    return "equal" if found == right else "differs"


def verdict_after_losing_all(kind: str, folder: Path, times: int, seed: int) -> str:
    """As `verdict`, for a job of which every process dies at `times` random moments.

    Each time another number of workers goes on from its newest checkpoint.
    """
    rng = random.Random(f"{seed} {kind}")
    script = Script(path=SCRIPT, args=(kind, str(STEPS)))
    with alone(folder / "alone", script) as process:
        right = lines_of(finish(process, folder / "alone", timeout_s=TIMEOUT_S))
    options = ["--standalone", "--checkpoint-dir", str(folder / "checkpoints"), "--checkpoint-every", "4"]
    found = set[str]()
    for go in range(times + 1):
        here = folder / f"job-{go}"
        with elastic(here, script, members=rng.choice([1, 2, 3]), options=options) as process:
            try:
                if go < times:
                    _kill_after_steps(process, here / "output.log", rng.randint(2, 3 * STEPS // (2 * times)))
                else:
                    finish(process, here, timeout_s=TIMEOUT_S)
            except RuntimeError as error:
                return str(error)
        found |= lines_of((here / "output.log").read_text(errors="replace"))
    return "equal" if found == right else "differs"


def _kill_after_steps(process: subprocess.Popen[bytes], output: Path, steps: int) -> None:
    """SIGKILL for the launcher as soon as so many steps are said; its guardian ends what it started."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(lines_of(output.read_text(errors="replace"))) < steps:
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(f"expected {steps} steps:\n{output.read_text(errors='replace')[-2000:]}")
        time.sleep(0.01)
    process.kill()
    process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(MODELS), default=list(MODELS), help="these models")
    parser.add_argument("--nodes", type=int, choices=(3,), help="three simulated nodes instead of one")
    parser.add_argument("--stages", type=int, default=1, help="members of a pipeline")
    parser.add_argument("--lose-all", type=int, default=0, metavar="N", help="kill everything N times, and resume")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the numbers of workers")
    add_record_flag(parser)
    args = parser.parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="elastrain-strangers-") as name:
        for kind in args.only:
            if args.lose_all:
                found[kind] = verdict_after_losing_all(kind, Path(name) / kind, args.lose_all, args.seed)
            else:
                found[kind] = verdict(kind, Path(name) / kind, nodes=args.nodes, stages=args.stages)
            print(f"{kind:<12} {found[kind]}", flush=True)
    values: dict[str, Any] = {
        "models": len(found),
        "digest_mismatches": sum(each == "differs" for each in found.values()),
        "failed_jobs": sum(each not in ("equal", "differs") for each in found.values()),
        "not_equal": sorted(kind for kind, each in found.items() if each != "equal"),
    }
    if args.record:
        record("strangers", values, quick=False, settings={"steps": STEPS, **vars(args)})
    return 0 if report(values, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
