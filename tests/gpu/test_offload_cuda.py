"""Offload of tensors on a CUDA device; skipped where there is none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastrain.offload.drives.host_buffers import tensor_checksum
from experiments.offload.models import KINDS, Shape
from experiments.offload.worker import Case, Worker

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SHAPE = Shape(width=512, layers=4, tokens=512, batch=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_keeping_and_the_device_has_room(kind: str, autocast: bool, tmp_path: Path) -> None:
    case = Case(name="keep", kind=kind, shape=SHAPE, directory=tmp_path, device="cuda", autocast=autocast)
    keep = Worker(case)
    kept = keep.memory()
    assert kept is not None
    limit_bytes = int(0.4 * keep.account())
    ours = Worker(replace(case, name="ours", limit_bytes=limit_bytes))
    for _ in range(3):
        ours.time()
    assert ours.digest() == keep.digest()
    spilled = ours.memory()
    assert spilled is not None
    assert spilled["account_bytes"] <= limit_bytes
    assert spilled["rss_bytes"] < 0.8 * kept["rss_bytes"]


def test_to_sum_what_was_copied_takes_hardly_any_memory() -> None:
    memory = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before_bytes = torch.cuda.memory_allocated()
    tensor_checksum(memory)
    assert torch.cuda.max_memory_allocated() - before_bytes < 4 << 20
