"""`save_on_disk` on a device: gradients keep their bits while saved activations lie on a drive, also in the CPU's."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from elastrain.device import DevicePort
from elastrain.offload import OffloadConfigError, save_on_disk, within
from elastrain.offload.activations import identity
from elastrain.offload.activations.deferred import DeferredLock
from elastrain.offload.drives.port import OWN_COPIES
from tests.contract.device.conftest import NAMED
from tests.support import late

if NAMED is late:
    late.handing_over(DeferredLock, gives=["__exit__", "wait"], takes=["__enter__", "wait"])
WIDTH, ROWS = 128, 256
STORAGE_BYTES = WIDTH * ROWS * 4


def model(port: DevicePort) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
    return nn.Sequential(*layers).to(port.device)


def gradients(port: DevicePort, around: AbstractContextManager[object]) -> Iterator[list[torch.Tensor]]:
    net, inputs = model(port), torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH).cos().to(port.device)
    for step in range(3):
        port.manual_seed(step)
        with around:
            loss = net(inputs).square().mean()
        loss.backward()
        yield [each.grad.cpu() for each in net.parameters() if each.grad is not None]
        net.zero_grad()


@pytest.mark.parametrize("limit", [None, 6 * STORAGE_BYTES], ids=["as the drive allows", "limited"])
def test_gradients_keep_their_bits_while_activations_leave(port: DevicePort, tmp_path: Path, limit: int | None) -> None:
    offload = save_on_disk(tmp_path, memory_limit=limit, min_bytes=1 << 10)
    for found, expected in zip(gradients(port, offload), gradients(port, nullcontext()), strict=True):
        assert all(map(torch.equal, found, expected))
    stats = offload.stats()
    assert stats.spilled_bytes > 0
    assert limit is None or stats.peak_bytes <= limit
    assert [each.moved_by for each in stats.devices] == ["" if port.is_host else OWN_COPIES]
    offload.close()


def test_a_device_whose_tensors_stay_is_named_once() -> None:
    identity.can_move.cache_clear()
    with pytest.warns(UserWarning, match="leaves tensors on 'mps' where they are, because torch has no streams"):
        assert not identity.can_move("mps")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not identity.can_move("mps")
        assert not identity.can_move("meta")  # has no bytes that could leave


def test_within_names_the_device_that_it_does_not_take(port: DevicePort, tmp_path: Path) -> None:
    if port.device.type in ("cpu", "cuda"):
        return
    net = model(port)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(OffloadConfigError, match=f"and is on {port.device}: save_on_disk moves activations"):
        within(net, optimizer, dirs=tmp_path, memory_limit=1 << 30)
