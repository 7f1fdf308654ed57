"""comm/autoload.py: what `import torch` calls on every machine where this package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.sources import ROOT

pytestmark = pytest.mark.slow  # each starts a cold Python that imports torch


def _run(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run([sys.executable, "-c", code], env=env, timeout=180, capture_output=True, text=True)


def test_it_registers_the_name_and_imports_nothing_heavy() -> None:
    done = _run(
        "import sys\n"
        "from elastrain.comm.autoload import autoload\n"
        "assert 'torch' not in sys.modules\n"
        "import torch.distributed as dist\n"
        "autoload(); autoload()\n"
        "assert 'elastrain' in dist.Backend.backend_list\n"
        "assert 'elastrain.comm.torch_backend.bootstrap' not in sys.modules\n"
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
        "autoload()\n",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",  # else torch has called it already, where this package is installed
    )
    assert done.returncode == 0
    assert "the backend 'elastrain' is not available" in done.stderr


def test_the_entry_point_registers_the_backend_at_import_torch_and_brings_nothing_else(tmp_path: Path) -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["entry-points"]["torch.backends"]
    installed = tmp_path / "like_elastrain-0.dist-info"  # what an installation leaves behind
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: like-elastrain\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in declared.items())
    (installed / "entry_points.txt").write_text(f"[torch.backends]\n{lines}")
    done = _run(
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import torch\n"
        "assert 'elastrain' in torch.distributed.Backend.backend_list\n"
        "ours = {name for name in sys.modules if name.split('.')[0] == 'elastrain'}\n"
        "assert ours == {'elastrain', 'elastrain.version', 'elastrain.comm', 'elastrain.comm.autoload'}, ours\n"
    )
    assert done.returncode == 0, done.stderr


def test_whoever_imports_torch_first_finds_the_backend_registered_by_importing_the_package() -> None:
    done = _run(
        "import torch.distributed as dist, elastrain.comm\n"
        "assert 'elastrain' in dist.Backend.backend_list\n"
        "assert callable(elastrain.comm.reconfigure) and callable(elastrain.comm.surviving)\n"
        "try: elastrain.comm.nothing\n"
        "except AttributeError as error: assert \"no attribute 'nothing'\" in str(error)\n"
        "else: raise AssertionError\n"
    )
    assert done.returncode == 0, done.stderr


def test_the_package_without_torch_stays_without_it() -> None:
    done = _run("import sys, elastrain.comm; assert 'torch' not in sys.modules\n")
    assert done.returncode == 0, done.stderr
