"""Facts of this machine that decide its bits, as one JSON object: `python -m elastrain.runtime.bits.kernel_facts`."""

from __future__ import annotations

import json
import platform
import sys

import numpy as np
import torch

from elastrain.runtime.model.kernels import kernel_digests
from elastrain.version import __version__


def machine_facts() -> dict[str, str]:
    """Return versions, and the digest of each fixed kernel under the name "kernel …"."""
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    return {
        "elastrain": __version__,
        "torch": str(torch.__version__),
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "device": device.type,
        **{f"kernel {name}": value for name, value in kernel_digests(device).items()},
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(machine_facts()))
