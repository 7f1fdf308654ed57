"""TorchFT beside the environment's torch, for comparisons with it; `python -m experiments.torchft` fetches it."""

from __future__ import annotations

import shutil
import subprocess
import sys

from experiments.harness import ROOT

FOLDER = ROOT / "runs" / "torchft"
PACKAGE = "torchft-nightly==2026.10.26"
_NEEDS = ("opentelemetry-sdk==1.45.2", "opentelemetry-exporter-otlp-proto-http==1.45.2")


def is_here() -> bool:
    return (FOLDER / "torchft").is_dir()


def provide() -> str | None:
    """Have it in a folder of its own. Returns why not, if it cannot be had."""
    if is_here():
        return None
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(FOLDER)]
    # Not its own dependencies: they would bring another torch.
    for packages in (_NEEDS, ("--no-deps", PACKAGE)):
        done = subprocess.run([*install, *packages], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            shutil.rmtree(FOLDER, ignore_errors=True)
            return f"{PACKAGE} cannot be installed: {done.stderr.strip()[-300:]}"
    return None


if __name__ == "__main__":
    sys.exit(provide())
