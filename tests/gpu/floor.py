"""`make test-floor`: everything that `make test-gpu` runs, on the test device, under the lowest version of torch.

`python -m tests.gpu.floor [WORD …]` runs the steps whose names have one of the words. With FULL=1 in the environment
the experiment with accelerators runs whole, otherwise what seeds draw.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from experiments.harness import ROOT, commit
from tests.gpu import shown
from tests.gpu.claims import PARTS

STEPS = {
    "contract tests of the test device": "-m pytest -q tests/contract/late",
    "the suite of the port to devices": "-m pytest -q tests/contract/device",
    **{f"test part {part}": "-m tests.gpu.run" for part in PARTS},
}
EXPERIMENT = "-m experiments.accelerator.run --record"
QUICK = {f"the experiment as seed {seed} draws it": f"{EXPERIMENT} --quick --seed {seed}" for seed in (21, 22)}
FULL = {"all rows of the experiment": EXPERIMENT}


def main(words: Sequence[str] = ()) -> int:
    """Run the steps, append a line about each, and return the exit code."""
    steps = {**STEPS, **(FULL if os.environ.get("FULL") else QUICK)}
    torch, at = version("torch"), commit()
    failed = []
    for name, command in steps.items():
        if words and not any(word in name for word in words):
            continue
        print(f"torch {torch}: {name}", flush=True)
        environment = {**os.environ, "DEVICE": "late", "PYTHONPATH": str(ROOT), "PART": name[-1]}
        ended = subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment)
        failed += [name] if ended.returncode else []
        line = {"part": None, "key": "floor", "case": name, "value": not ended.returncode, "note": "", "device": "late"}
        line |= {"driver": "none", "versions": {"torch": torch}, "commit": at}
        shown.append([line | {"date": datetime.now(UTC).isoformat(timespec="seconds")}])
    shown.write()
    print(f"torch {torch}: {'passed' if not failed else 'failed: ' + '; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
