"""Time of the tutorial, from an empty environment to the first kill that a job has survived.

python -m experiments.adoption.tutorial [--record]. The wheel is built before; pip then installs it, and torch from the
package index, into an environment that has nothing. pip uses no cache.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.harness import ROOT, Reach, add_record_flag, record, report

PAGE = ROOT / "docs" / "tutorials" / "ten-minutes.md"
REACHES = {"minutes": Reach(limit=5), "commands": Reach(limit=3)}
TIMEOUT_S = 1200.0


def snippets() -> tuple[str, list[str]]:
    """Return the page's script, and its commands that make and start the job in which a worker is killed."""
    page = PAGE.read_text()
    script = re.search(r'```python title="train.py"\n(.*?)```', page, re.DOTALL)
    commands = re.search(r"## Run it with three workers, and kill one.*?```sh\n(.*?)```", page, re.DOTALL)
    assert script is not None and commands is not None
    return script[1], commands[1].strip().splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.adoption.tutorial", description=__doc__)
    add_record_flag(parser)
    options = parser.parse_args()
    script, commands = snippets()
    with tempfile.TemporaryDirectory(prefix="tutorial-") as name:
        folder = Path(name)
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
        subprocess.run(wheel, check=True)
        (folder / "train.py").write_text(script)
        install = f"pip install --quiet --no-cache-dir -c {ROOT}/constraints.txt torch ./*.whl"
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")},
            "PATH": f"{folder}/venv/bin:{os.environ['PATH']}",
        }
        took_s, output = [], ""
        for command in (install, *commands):
            began_s = time.monotonic()
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
            )
            took_s.append(time.monotonic() - began_s)
            output = done.stdout + done.stderr
            if done.returncode:
                raise RuntimeError(f"{command} ended with code {done.returncode}:\n{output[-2000:]}")
    is_survived = "m1 lost" in output and "finished after step 199" in output
    if not is_survived:
        raise RuntimeError(f"the job has not survived a kill:\n{output[-2000:]}")
    found = {"minutes": sum(took_s) / 60, "commands": len(took_s), "install_s": took_s[0], "job_s": took_s[-1]}
    if options.record:
        record("adoption", found, quick=True, settings={"tutorial": PAGE.name})
    return 0 if report(found, REACHES) else 1


if __name__ == "__main__":
    sys.exit(main())
