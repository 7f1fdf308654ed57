"""GPUDirect Storage: refused with a reason where it cannot work, bit-equal where it does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastrain.offload import OffloadConfigError, save_on_disk
from elastrain.offload.drives.gds import GdsEngine, probe

HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device: KvikIO moves CUDA tensors only")


@pytest.mark.skipif(HAS_CUDA, reason="there is a CUDA device here")
def test_without_a_device_it_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert probe(tmp_path) == "this process sees no CUDA device, and KvikIO moves CUDA tensors only"
    with pytest.raises(OffloadConfigError, match=r"GPUDirect Storage cannot be used in .*no CUDA device"):
        GdsEngine(tmp_path)
    with pytest.raises(OffloadConfigError, match="no CUDA device"):
        save_on_disk([tmp_path], gds=True).__enter__()
    assert list(tmp_path.iterdir()) == []


def with_kvikio(tmp_path: Path) -> None:
    why = probe(tmp_path)
    if why is not None:
        pytest.skip(why)


@pytest.mark.gpu
@needs_cuda
def test_a_gibibyte_comes_back_bit_equal(tmp_path: Path) -> None:
    with_kvikio(tmp_path)
    engine = GdsEngine(tmp_path)
    engine.reserve(1 << 30)
    there = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    back = torch.zeros_like(there)
    engine.write_cuda(0, there)
    engine.read_cuda(0, back)
    assert torch.equal(there, back)
    engine.close()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("gds", [False, True], ids=["pinned", "gds"])
def test_gradients_on_a_gpu_keep_their_bits(tmp_path: Path, gds: bool) -> None:
    if gds:
        with_kvikio(tmp_path)
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)], torch.nn.Tanh()).cuda()
    x = torch.randn(1024, 512, device="cuda")
    net(x).square().mean().backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    offload = save_on_disk([tmp_path], memory_limit=8 << 20, gds=gds)
    for _ in range(3):
        net.zero_grad()
        with offload:
            loss = net(x).square().mean()
        loss.backward()
        found = [p.grad for p in net.parameters() if p.grad is not None]
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert offload.stats().spilled_bytes > 0
    offload.close()
