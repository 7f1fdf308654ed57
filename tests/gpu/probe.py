"""Print what this interpreter's device is, as JSON, in a process of its own, which may hang."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import import_module
from pathlib import Path

IMPORTED = ("numpy", "typer", "rich", "msgspec", "zstandard", "xxhash", "safetensors", "cryptography.hazmat.primitives")


def driver(kind: str) -> str:
    """Return the version of the device's driver, as far as the system tells it."""
    file = Path("/proc/driver/nvidia/version")
    if kind == "cuda" and file.exists():
        words = file.read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "unknown")
    if kind == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            return "unknown"
    return "none" if kind in ("late", "cpu") else platform.release()


def main() -> None:
    import torch

    from elastrain.device import current_device, device_of
    from elastrain.version import __version__

    wanted = sys.argv[1]
    if wanted == "late":
        from tests.support import late

        late.install()
    port = device_of(torch.device(wanted)) if wanted else current_device()
    if port.is_host and wanted != "cpu":
        print(json.dumps({"kind": None}))
        return
    about = port.describe()
    port.empty(1, torch.float32).fill_(1.0)
    port.synchronize()  # a device that is broken says so here
    broken = ""
    for name in IMPORTED:
        try:
            import_module(name)
        except ImportError as error:
            broken = broken or f"{name} cannot be imported: {error}"
    versions = {"elastrain": __version__, "torch": torch.__version__, "python": platform.python_version()}
    versions |= {name: value for name in ("runtime", "cudnn", "triton") if (value := getattr(about, name))}
    found = {"kind": about.type, "name": about.name, "uuid": about.uuid, "driver": driver(about.type)}
    print(json.dumps({**found, "versions": versions, "broken": broken}))


if __name__ == "__main__":
    main()
