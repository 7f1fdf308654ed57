"""comm/autoload.py: what `import torch` calls on every machine where this package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def _run(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, timeout=60, capture_output=True, text=True)


def test_it_registers_the_name_and_imports_nothing_heavy() -> None:
    done = _run(
        "import sys\n"
        "from elastrain.comm.autoload import autoload\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.distributed as dist\n"
        "autoload(); autoload()\n"
        "assert 'elastrain' in dist.Backend.backend_list\n"
        "assert 'elastrain.comm.torch_backend' not in sys.modules\n"
        "dist.init_process_group('elastrain', store=dist.HashStore(), rank=0, world_size=1)\n"
        "tensor = __import__('torch').ones(3); dist.all_reduce(tensor); assert tensor.sum() == 3\n"
        "dist.destroy_process_group()\n"
    )
    assert done.returncode == 0, done.stderr


def test_it_never_raises() -> None:
    done = _run(
        "import torch.distributed.distributed_c10d as c10d\n"
        "c10d.Backend.register_backend = None\n"
        "from elastrain.comm.autoload import autoload\n"
        "autoload()\n"
    )
    assert done.returncode == 0
    assert "the backend 'elastrain' is not available" in done.stderr
