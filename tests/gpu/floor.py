"""`make test-floor`: everything that `make test-gpu` runs, on the test device, under the lowest version of torch.

With FULL=1 in the environment the experiment with accelerators runs whole, otherwise what seeds draw.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version

from experiments.harness import ROOT, commit
from tests.gpu import shown

STEPS = {
    "contract tests of the test device": "-m pytest -q tests/contract/late",
    "the suite of the port to devices": "-m pytest -q tests/contract/device",
    "test parts on the test device": "-m tests.gpu.run",
}
EXPERIMENT = "-m experiments.accelerator.run --record"
QUICK = {f"the experiment as seed {seed} draws it": f"{EXPERIMENT} --quick --seed {seed}" for seed in (21, 22)}
FULL = {"all rows of the experiment": EXPERIMENT}


def main() -> int:
    """Run the steps, and append one line that says whether all passed."""
    environment = {**os.environ, "DEVICE": "late", "PYTHONPATH": str(ROOT)}
    failed = []
    for name, command in {**STEPS, **(FULL if os.environ.get("FULL") else QUICK)}.items():
        print(f"torch {version('torch')}: {name}", flush=True)
        if subprocess.run([sys.executable, *command.split()], cwd=ROOT, env=environment).returncode:
            failed.append(name)
    line = {"part": None, "key": "floor", "case": "", "value": not failed, "note": "; ".join(failed), "device": "late"}
    line |= {"driver": "none", "versions": {"torch": version("torch")}, "commit": commit()}
    shown.append([line | {"date": datetime.now(UTC).isoformat(timespec="seconds")}])
    shown.write()
    print(f"torch {version('torch')}: {'passed' if not failed else 'failed: ' + '; '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
