"""The amount follows the drive on real passes: a drive that slows down is given less, and more when it recovers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from elastrain.offload import ActivationOffload, OffloadConfig
from elastrain.offload import Path as Way
from elastrain.offload.engines.memory import MemoryEngine
from elastrain.offload.faults import ThrottledEngine

SLOW_BYTES_PER_S = 20e6
PASSES_AT_MOST = 100


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Drive(MemoryEngine):
    """Memory that answers like a slow drive while `slow` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = False
        self._inner = MemoryEngine()
        self._slowed = ThrottledEngine(self._inner, bytes_per_s=SLOW_BYTES_PER_S)

    def reserve(self, size_bytes: int) -> None:
        self._inner.reserve(size_bytes)

    def write(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        (self._slowed if self.slow else self._inner).write(offset_bytes, views)

    def read(self, offset_bytes: int, views: Sequence[memoryview]) -> None:
        (self._slowed if self.slow else self._inner).read(offset_bytes, views)


def test_a_drive_that_slows_down_is_given_less_and_more_again_when_it_recovers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(8)])
    x, drive = torch.randn(8192, 128), Drive()
    config = OffloadConfig(dirs=(str(tmp_path),), min_bytes=1 << 20, deterministic=False)
    offload = ActivationOffload(config, engines=[drive])

    def one_pass() -> bool:
        """Whether the drive was seen to be slow when last measured."""
        net.zero_grad()
        with offload:
            loss = net(x).square().mean()
        loss.backward()
        (device,) = offload.stats().devices
        return min(device.write_bytes_per_s, device.read_bytes_per_s) < 2 * SLOW_BYTES_PER_S

    def leaving() -> int:
        """How many storages leave in a pass, once it was seen how fast the drive is now."""
        for _ in range(PASSES_AT_MOST):
            if one_pass() == drive.slow:
                break
        one_pass()  # of which the plan is made
        one_pass()
        last = offload.stats().last
        assert last is not None
        return sum(each.path is not Way.KEPT for each in last.lifetimes)

    fast = leaving()
    drive.slow = True
    slow = leaving()
    drive.slow = False
    recovered = leaving()
    assert slow < fast
    assert slow < recovered
    offload.close()
